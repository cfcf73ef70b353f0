/* The pattern: terms on the left write the text, unless it is written by hand. */
function known(name) { return options.names.find(each => each.name === name); }
function inWords() {
  return terms.map((term, i) => {
    const values = [...term.values];
    while (values.length && values.at(-1) === "") values.pop();
    return (i ? ` ${term.joiner} ` : "") + term.name + (values.length ? ":" + values.join("/") : "");
  }).join("");
}
function newTerm(name) { return {name, joiner: "|", values: [...known(name).example]}; }
/* The terms that would write this text, or null where only a hand can. */
function termsOf(text) {
  if (/[();]/.test(text)) return null;
  const parts = text.split(/\s*([&|+])\s*/), found = [];
  for (let i = 0; i < parts.length; i += 2) {
    const [, name, , values] = parts[i].match(/^\s*(\w+)(:(\S+))?\s*$/) ?? [];
    const about = name && known(name), given = values ? values.split("/") : [];
    if (!about || given.length > about.arguments.length) return null;
    while (given.length < about.arguments.length) given.push("");
    found.push({name, joiner: i && parts[i - 1] === "&" ? "&" : "|", values: given});
  }
  return found;
}
function drawTerms() {
  at("terms").replaceChildren(...terms.map((term, i) => {
    const below = make("div");
    const kind = make("select", {id: `kind${i}`, onchange() { Object.assign(term, newTerm(this.value), {joiner: term.joiner}); fill(); changed(); }},
      ...options.names.map(each => make("option", {value: each.name, selected: each.name === term.name}, each.name)));
    const top = make("div", {className: "top"}, make("label", {}, i ? "with" : "Kind", kind));
    if (i) {
      const joiner = make("select", {onchange() { term.joiner = this.value; changed(); }},
        make("option", {value: "|", selected: term.joiner === "|"}, "or"), make("option", {value: "&", selected: term.joiner === "&"}, "and"));
      top.prepend(make("label", {className: "joiner"}, "Combine", joiner));
      top.append(make("button", {type: "button", className: "remove", ariaLabel: "Remove this pattern",
        onclick() { terms.splice(i, 1); drawTerms(); changed(); at("add").focus(); }}, "×"));
    }
    function fill() {  // the choice itself stays, and with it the focus
      const about = known(term.name);
      const fields = about.arguments.map((label, n) => make("label", {className: term.values[n].includes(",") ? "wide" : ""},
        label[0].toUpperCase() + label.slice(1),
        make("input", {value: term.values[n], spellcheck: false, autocomplete: "off",
                       oninput() { term.values[n] = this.value.replace(/\s+/g, ""); changed(); }})));
      below.replaceChildren(make("p", {}, about.meaning), ...(fields.length ? [make("div", {className: "fields"}, ...fields)] : []));
    }
    fill();
    return make("div", {className: "term"}, top, below);
  }));
}

/* Ask the library, the last question only. */
let asked = 0, waiting, wanted = "view";
function question() {
  const asks = {pattern: at("expression").value};
  for (const name of [...NUMBERS, ...CHOICES]) if (at(name).value !== "" && !at(name).disabled) asks[name] = at(name).value;
  for (const name of FLAGS) asks[name] = at(name).checked ? "1" : "0";
  if (view.span && !whole()) Object.assign(asks, {first_query: view.query, first_key: view.key, span: view.span});
  return asks;
}
const whole = () => view.span >= +at("tokens").value;
function changed(what = "layout") {
  if (what === "layout") wanted = "layout";
  if (!at("own").checked) at("expression").value = inWords();
  const content = at("scorer").value !== "";
  at("block_size").disabled = /longnet/.test(at("expression").value);
  at("heads").disabled = /;/.test(at("expression").value);
  at("kept").disabled = at("budget").disabled = !content;
  if (what === "layout" && answer && +at("tokens").value !== answer.tokens) Object.assign(view, {query: 0, key: 0, span: 0});
  history.replaceState(null, "", "#" + new URLSearchParams({...question(), own: at("own").checked ? "1" : "0", tab}));
  clearTimeout(waiting);
  waiting = setTimeout(ask, 150);
}
async function ask() {
  const mine = ++asked, what = wanted;
  document.body.setAttribute("aria-busy", "true");
  let found;
  try {
    const response = await fetch(`/api/${what}?${new URLSearchParams(question())}`);
    found = await response.json();
  } catch {
    found = {error: "The server does not answer. Is `dilated-attention explore` still running?"};
  }
  if (mine !== asked) return;
  document.body.removeAttribute("aria-busy");
  at("error").textContent = found.error ?? "";
  at("error").classList.toggle("shown", "error" in found);
  for (const part of document.querySelectorAll("[data-result]")) part.classList.toggle("stale", "error" in found);
  if ("error" in found) return;
  wanted = "view";
  answer = what === "view" ? {...answer, ...found}
    : {...found, dilated: /longnet/.test(found.pattern) && !at("scorer").value, scorer: at("scorer").value, kept: at("kept").value};
  if (!view.span) view.span = answer.tokens;
  cursor = null;
  render(what);
}
function render(what) {
  if (what === "layout") { drawFigures(); drawMemory(); drawCode(); }
  drawLegend();
  drawMask();
  drawQuery();
  say();
}

at("copy").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(at("code").textContent); at("copy").textContent = "Copied"; }
  catch { getSelection().selectAllChildren(at("code")); at("copy").textContent = "Selected"; }
  setTimeout(() => { at("copy").textContent = "Copy"; }, 1500);
});
for (const button of document.querySelectorAll("[data-tab]"))
  button.addEventListener("click", () => { tab = button.dataset.tab; if (answer) drawCode(); changed("view"); });
at("add").addEventListener("click", () => { terms.push(newTerm("global")); drawTerms(); changed(); at(`kind${terms.length - 1}`).focus(); });
function byHand(own) {
  at("own").checked = own;
  at("expression").readOnly = !own;
  at("terms").hidden = at("add").hidden = own;
}
at("own").addEventListener("change", () => {
  const own = at("own").checked, read = own ? null : termsOf(at("expression").value);
  if (read) { terms = read; drawTerms(); }
  byHand(own);
  if (!own) changed(); else changed("view");
});
at("expression").addEventListener("input", () => changed());
for (const name of [...NUMBERS, ...CHOICES, ...FLAGS]) at(name).addEventListener("input", () => changed(OF_VIEW.includes(name) ? "view" : "layout"));
const again = () => { if (answer) { drawMask(); drawStrips(); } };
addEventListener("resize", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);

(async () => {
  options = await (await fetch("/api/options")).json();
  const fill = (id, values, chosen) => at(id).replaceChildren(...values.map(value =>
    make("option", {value: Array.isArray(value) ? value[0] : value, selected: value === chosen}, String(Array.isArray(value) ? value[1] : value))));
  fill("block_size", options.block_sizes, 128);
  fill("dtype", options.dtypes, "bfloat16");
  fill("device", options.devices, options.devices[0]);
  fill("scorer", [["", "none: the pattern alone"], ...options.scorers], "");
  fill("budget", Object.entries(options.budgets).map(([name, meaning]) => [name, `${name}: ${meaning}`]), "even");
  for (const [name, most] of Object.entries({...options.limits, heads_kv: options.limits.heads})) if (at(name)) at(name).max = most;
  const shared = new URLSearchParams(location.hash.slice(1));
  const text = shared.get("pattern") ?? "";
  terms = (text && shared.get("own") !== "1" && termsOf(text)) || [newTerm("window")];
  for (const name of [...NUMBERS, ...CHOICES]) if (shared.has(name)) at(name).value = shared.get(name);
  for (const name of FLAGS) at(name).checked = shared.get(name) === "1";
  for (const [place, name] of [["query", "first_query"], ["key", "first_key"], ["span", "span"]]) view[place] = +(shared.get(name) ?? 0);
  if (shared.get("tab") === "register") tab = "register";
  at("expression").value = text;
  byHand(Boolean(text) && (shared.get("own") === "1" || !termsOf(text)));
  drawTerms();
  changed();
})();
