/* The mask: what is drawn lies where its tokens are, so that an answer for another part still stands right. */
const LEAST_SPAN = 16;

function cellColour(partial, full, colours) {
  const held = partial + full;
  if (!held) return colours.empty;
  const seen = held >= 1000 ? 1 : 0.35 + 0.65 * held / 1000;  // one block of thousands is not lost
  return colours.empty.map((ground, i) =>
    Math.round(ground + seen * ((partial * colours.partial[i] + full * colours.full[i]) / held - ground)));
}
function maskColours() {
  return Object.fromEntries(["empty", "partial", "full", "grid", "ink", "row", "card"].map(name => [name, colour("--" + name)]));
}
function drawMask() {
  const canvas = at("mask"), side = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio));
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d"), colours = maskColours(), scale = side / view.span;
  const height = answer.full.length, width = answer.full[0].length, [stepQ, stepK] = answer.cell_tokens;
  const small = make("canvas", {width, height}), image = new ImageData(width, height);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++)
    image.data.set([...cellColour(answer.partial[y][x], answer.full[y][x], colours), 255], 4 * (y * width + x));
  small.getContext("2d").putImageData(image, 0, 0);
  context.fillStyle = css(colours.card);
  context.fillRect(0, 0, side, side);
  context.imageSmoothingEnabled = false;
  context.save();  // the last block may reach beyond the sequence: it is cut off, as the sequence is
  context.beginPath();
  context.rect(-view.key * scale, -view.query * scale, answer.tokens * scale, answer.tokens * scale);
  context.clip();
  context.drawImage(small, (answer.first[1] - view.key) * scale, (answer.first[0] - view.query) * scale,
    width * stepK * scale, height * stepQ * scale);
  drawLines(context, scale, side, css(colours.grid));
  if (answer.row) drawRow(context, scale, side, colours);
  if (cursor) {
    context.strokeStyle = css(colours.ink);
    context.lineWidth = 2 * devicePixelRatio;
    const [row, column] = cursor.map((cell, i) => answer.first[i] + cell * answer.cell_tokens[i]);
    context.strokeRect((column - view.key) * scale, (row - view.query) * scale, Math.max(stepK * scale, 4), Math.max(stepQ * scale, 4));
  }
  context.restore();
  for (const [name, from] of Object.entries({query: view.query, key: view.key})) {
    document.querySelector(`[data-first=${name}]`).textContent = number(from);
    document.querySelector(`[data-last=${name}]`).textContent = number(Math.min(from + view.span, answer.tokens));
  }
}
/* Between blocks, where they are large enough; dilated attention has no blocks of neighbours, only cells. */
function drawLines(context, scale, side, style) {
  const steps = answer.dilated ? answer.cell_tokens : answer.block_size;
  context.fillStyle = style;
  if (steps[1] * scale >= 9)
    for (let key = Math.ceil(view.key / steps[1]) * steps[1]; key < view.key + view.span; key += steps[1])
      context.fillRect(Math.round((key - view.key) * scale), 0, 1, side);
  if (steps[0] * scale >= 9)
    for (let query = Math.ceil(view.query / steps[0]) * steps[0]; query < view.query + view.span; query += steps[0])
      context.fillRect(0, Math.round((query - view.query) * scale), side, 1);
}
/* A cell of a strip as [x, y, width, height], in whole pixels: neighbours touch. */
function across(row, i, scale, [y, high]) {
  const [from, to] = [i, i + 1].map(cell => Math.round((row.strip_first + cell * row.strip_tokens - view.key) * scale));
  return [from, y, Math.max(1, to - from), high];
}
/* The row of the picked query: its keys in the colour of the row, over a band of the page's ground. */
function drawRow(context, scale, side, colours) {
  const row = answer.row, middle = (row.query + 0.5 - view.query) * scale, high = Math.max(8 * devicePixelRatio, scale);
  if (middle < 0 || middle > side) return;
  context.fillStyle = css(colours.card);
  context.fillRect(0, middle - high / 2 - devicePixelRatio, side, high + 2 * devicePixelRatio);
  context.fillStyle = css(colours.row);
  row.seen.forEach((seen, i) => {
    if (seen) context.fillRect(...across(row, i, scale, [middle - high / 2, high]));
  });
}
/* A line for each layer: what the query depends on after so many. */
function drawStrips() {
  at("reach").hidden = !answer.row;
  if (!answer.row) return;
  const canvas = at("strips"), row = answer.row, layers = row.reach.length, high = Math.round(clamp(96 / layers, 4, 14) * devicePixelRatio);
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio));
  canvas.height = layers * high;
  canvas.style.height = `${canvas.height / devicePixelRatio}px`;
  const context = canvas.getContext("2d"), colours = maskColours(), scale = canvas.width / view.span;
  row.reach.forEach(({layer}, line) => {
    context.fillStyle = css(colours.empty);
    context.fillRect(0, line * high, canvas.width, high - 1);
    context.fillStyle = css(colours.row);
    row.needed.forEach((needed, i) => {
      if (!needed || needed > layer) return;
      context.globalAlpha = needed === layer ? 1 : 0.45;  // what is new with this layer stands out
      context.fillRect(...across(row, i, scale, [line * high, high - 1]));
    });
    context.globalAlpha = 1;
  });
}

/* Where one looks. */
function look(query, key, span) {
  view.span = clamp(Math.round(span), Math.min(LEAST_SPAN, answer.tokens), answer.tokens);
  view.query = clamp(Math.round(query), 0, answer.tokens - view.span);
  view.key = clamp(Math.round(key), 0, answer.tokens - view.span);
  cursor = null;
  drawMask();
  drawStrips();
  say();
  changed("view");
}
/* The token under the point (0…1 of the side) stays there. */
function zoom(factor, point = [0.5, 0.5]) {
  if (!answer) return;
  const span = clamp(Math.round(view.span / factor), Math.min(LEAST_SPAN, answer.tokens), answer.tokens);
  look(view.query + point[0] * (view.span - span), view.key + point[1] * (view.span - span), span);
}
function pick(query) {
  at("query").value = query ?? "";
  changed("view");
}

/* The cell that is pointed at. */
function cellAt(event) {
  const box = at("mask").getBoundingClientRect(), scale = box.width / view.span;
  const tokens = [view.query + (event.clientY - box.top) / scale, view.key + (event.clientX - box.left) / scale];
  return tokens.map((token, i) => Math.floor((token - answer.first[i]) / answer.cell_tokens[i]));
}
function point(row, column) {
  if (!answer) return;
  const clamped = (value, i, count) => {
    const first = i ? view.key : view.query, step = answer.cell_tokens[i];
    const low = Math.max(0, Math.floor((first - answer.first[i]) / step));
    return clamp(value, low, Math.min(count - 1, Math.ceil((first + view.span - answer.first[i]) / step) - 1));
  };
  cursor = [clamped(row, 0, answer.full.length), clamped(column, 1, answer.full[0].length)];
  drawMask();
  say();
}
const range = (cell, i) => {
  const from = answer.first[i] + cell * answer.cell_tokens[i], to = Math.min(from + answer.cell_tokens[i], answer.tokens) - 1;
  return from === to ? number(from) : `${number(from)}–${number(to)}`;
};
function say() {
  const name = `${answer.scorer ? `${answer.scorer}, ${answer.kept} % of the blocks` : answer.pattern}${answer.is_causal ? ", causal" : ""}, head ${answer.head}`;
  at("mask").setAttribute("aria-label", `Mask of ${name}`);
  if (!cursor) { at("under").textContent = name + (answer.note ? `; ${answer.note}` : ""); return; }
  const partial = answer.partial[cursor[0]][cursor[1]], full = answer.full[cursor[0]][cursor[1]];
  const state = answer.pairs ? full ? "allowed" : partial ? "masked inside an active block" : "empty"
    : full === 1000 ? "full" : partial === 1000 ? "partial" : !full && !partial ? "empty"
    : [full && `${full / 10} % ${answer.dilated ? "of it allowed" : "full"}`, partial && `${partial / 10} % partial`].filter(Boolean).join(", ");
  at("under").textContent = `queries ${range(cursor[0], 0)}, keys ${range(cursor[1], 1)}: ${state}`;
}

let dragged = null;
at("mask").addEventListener("pointerdown", event => {
  if (!answer) return;
  at("mask").setPointerCapture(event.pointerId);
  dragged = {x: event.clientX, y: event.clientY, query: view.query, key: view.key, moved: false};
});
at("mask").addEventListener("pointermove", event => {
  if (!answer) return;
  if (!dragged) { point(...cellAt(event)); return; }
  const scale = at("mask").clientWidth / view.span;
  dragged.moved ||= Math.hypot(event.clientX - dragged.x, event.clientY - dragged.y) > 4;
  if (dragged.moved) look(dragged.query - (event.clientY - dragged.y) / scale, dragged.key - (event.clientX - dragged.x) / scale, view.span);
});
at("mask").addEventListener("pointerup", event => {
  if (!dragged) return;
  const box = at("mask").getBoundingClientRect();
  if (!dragged.moved) pick(clamp(Math.floor(view.query + (event.clientY - box.top) / box.height * view.span), 0, answer.tokens - 1));
  dragged = null;
});
at("mask").addEventListener("pointercancel", () => { dragged = null; });
at("mask").addEventListener("wheel", event => {
  if (!answer || !(event.ctrlKey || event.metaKey || document.activeElement === at("mask"))) return;
  event.preventDefault();
  const box = at("mask").getBoundingClientRect();
  zoom(event.deltaY < 0 ? 1.25 : 0.8, [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width]);
}, {passive: false});
const away = () => { if (answer && cursor) { cursor = null; drawMask(); say(); } };
at("mask").addEventListener("pointerleave", () => { if (document.activeElement !== at("mask")) away(); });
at("mask").addEventListener("blur", away);
at("mask").addEventListener("keydown", event => {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (!answer || event.ctrlKey || event.metaKey || event.altKey) return;
  if (step && event.shiftKey) look(view.query + step[0] * view.span / 4, view.key + step[1] * view.span / 4, view.span);
  else if (step) cursor ? point(cursor[0] + step[0], cursor[1] + step[1]) : point(-1, -1);
  else if (event.key === "+" || event.key === "=") zoom(2);
  else if (event.key === "-") zoom(0.5);
  else if (event.key === "0") look(0, 0, answer.tokens);
  else if (event.key === "Enter" && cursor) pick(clamp(answer.first[0] + cursor[0] * answer.cell_tokens[0], 0, answer.tokens - 1));
  else if (event.key === "Escape") pick(null);
  else return;
  event.preventDefault();
});
at("in").addEventListener("click", () => zoom(2));
at("out").addEventListener("click", () => zoom(0.5));
at("whole").addEventListener("click", () => answer && look(0, 0, answer.tokens));
