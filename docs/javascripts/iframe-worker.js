// The site's search runs in a Worker, which browsers refuse to pages that were opened from the disk (file://). There,
// and only there, this stands in for it: the worker's script runs in a hidden frame of the same page.
// The theme knows the name: its search asks whether its parent has an IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #early = [];
    #frame = document.createElement("iframe");

    constructor(script) {
      super();
      this.onmessage = null;
      this.#frame.hidden = true;
      this.#frame.title = "search";
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.onmessage?.(event);
        this.dispatchEvent(event);
      };
      // In a worker this blocks; the theme's search awaits what it returns.
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(inside.document, source);
      };
      load(inside.document, script).then(() => {
        const waiting = this.#early;
        this.#early = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.#early) {
        this.#early.push(data);
      } else {
        const inside = this.#frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      }
    }

    terminate() {
      this.#frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;

  const load = (page, source) =>
    new Promise((done, failed) => {
      const tag = page.createElement("script");
      Object.assign(tag, { src: source, onload: done, onerror: failed });
      page.body.append(tag);
    });
}
