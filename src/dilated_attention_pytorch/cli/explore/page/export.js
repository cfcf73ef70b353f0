/* The mask as a file: one list of rectangles and words, written as SVG or painted as PNG. */
const PAPER = {side: 640, left: 70, top: 64, right: 24, bottom: 62};

function scene() {
  const colours = maskColours(), scale = PAPER.side / view.span, boxes = [], words = [];
  const end = answer.tokens, place = (token, from) => (clamp(token, from, Math.min(from + view.span, end)) - from) * scale;
  const box = (keys, queries, tint) => {
    const [x0, x1] = keys.map(token => place(token, view.key)), [y0, y1] = queries.map(token => place(token, view.query));
    if (x1 > x0 && y1 > y0) boxes.push([PAPER.left + x0, PAPER.top + y0, x1 - x0, y1 - y0, tint]);
  };
  const [stepQ, stepK] = answer.cell_tokens, [top, left] = answer.first, soft = css(colour("--soft")), ink = css(colours.ink);
  box([0, end], [0, end], css(colours.empty));
  answer.full.forEach((row, y) => {
    const tints = row.map((full, x) => full || answer.partial[y][x] ? css(cellColour(answer.partial[y][x], full, colours)) : "");
    for (let x = 0, from = 0; x < tints.length; x++)
      if (tints[x + 1] !== tints[x]) {  // neighbours of one colour are one rectangle
        if (tints[x]) box([left + from * stepK, left + (x + 1) * stepK], [top + y * stepQ, top + (y + 1) * stepQ], tints[x]);
        from = x + 1;
      }
  });
  const legend = [...at("legend").children].map(entry => [entry.textContent, entry.style.getPropertyValue("--c").match(/--\w+/)[0]]);
  if (answer.row) {
    const middle = answer.row.query + 0.5, half = Math.max(0.5, 4 / scale);
    box([0, end], [middle - half, middle + half], css(colours.card));
    answer.row.seen.forEach((seen, i) => {
      const from = answer.row.strip_first + i * answer.row.strip_tokens;
      if (seen) box([from, from + answer.row.strip_tokens], [middle - half, middle + half], css(colours.row));
    });
  }
  const right = PAPER.left + PAPER.side, below = PAPER.top + PAPER.side;
  words.push([PAPER.left, 28, "start", 17, ink, at("mask").getAttribute("aria-label").replace("Mask of ", "")]);
  words.push([PAPER.left, PAPER.top - 8, "start", 12, soft, number(view.key)], [PAPER.left + PAPER.side / 2, PAPER.top - 8, "middle", 12, soft, "keys"],
    [right, PAPER.top - 8, "end", 12, soft, number(Math.min(view.key + view.span, end))]);
  words.push([PAPER.left - 8, PAPER.top + 10, "end", 12, soft, number(view.query)], [PAPER.left - 8, PAPER.top + PAPER.side / 2, "end", 12, soft, "queries"],
    [PAPER.left - 8, below, "end", 12, soft, number(Math.min(view.query + view.span, end))]);
  let x = PAPER.left;
  for (const [text, name] of legend) {
    boxes.push([x, below + 16, 12, 12, css(colour(name))]);
    words.push([x + 18, below + 27, "start", 12, soft, text]);
    x += 42 + 6.4 * text.length;
  }
  words.push([PAPER.left, below + 50, "start", 12, soft, `${number(answer.tokens)} tokens, ${share(answer.density)} of the pairs${answer.note ? `; ${answer.note}` : ""}`]);
  return {width: right + PAPER.right, height: below + PAPER.bottom, ground: css(colours.card), boxes, words};
}
function svgOf({width, height, ground, boxes, words}) {
  const safe = text => text.replace(/[&<>"]/g, letter => `&#${letter.charCodeAt(0)};`), short = value => +value.toFixed(2);
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" font-family="sans-serif">` +
    `<title>${safe(words[0][5])}</title><rect width="100%" height="100%" fill="${ground}"/>` +
    `<g shape-rendering="crispEdges">${boxes.map(([x, y, w, h, tint]) => `<rect x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" fill="${tint}"/>`).join("")}</g>` +
    words.map(([x, y, anchor, size, tint, text]) => `<text x="${short(x)}" y="${short(y)}" text-anchor="${anchor}" font-size="${size}" fill="${tint}">${safe(text)}</text>`).join("") + "</svg>\n";
}
function pngOf({width, height, ground, boxes, words}) {
  const canvas = make("canvas", {width: 2 * width, height: 2 * height}), context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = ground;
  context.fillRect(0, 0, width, height);
  for (const [x, y, w, h, tint] of boxes) {
    const [x0, y0, x1, y1] = [x, y, x + w, y + h].map(value => Math.round(2 * value) / 2);
    context.fillStyle = tint;
    context.fillRect(x0, y0, x1 - x0, y1 - y0);
  }
  for (const [x, y, anchor, size, tint, text] of words) {
    context.font = `${size}px sans-serif`;
    context.textAlign = anchor === "middle" ? "center" : anchor;
    context.fillStyle = tint;
    context.fillText(text, x, y);
  }
  return new Promise(done => canvas.toBlob(done, "image/png"));
}
function save(blob, ending) {
  const address = URL.createObjectURL(blob), name = answer.pattern.replace(/[^\w]+/g, "-").replace(/^-|-$/g, "").slice(0, 60);
  make("a", {href: address, download: `${name}.${ending}`}).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
at("png").addEventListener("click", async () => answer && save(await pngOf(scene()), "png"));
at("svg").addEventListener("click", () => answer && save(new Blob([svgOf(scene())], {type: "image/svg+xml"}), "svg"));
