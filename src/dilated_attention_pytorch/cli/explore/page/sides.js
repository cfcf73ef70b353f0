/* The figures beside the mask, and what one query sees. */
const pairs = rows => rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));

function drawLegend() {
  const words = answer.pairs ? {full: "allowed", partial: "masked inside an active block", empty: "not computed"}
    : answer.dilated ? {full: "allowed", empty: "not computed"}
    : {full: "full: every pair", partial: "partial: some pairs", empty: "empty: not computed"};
  at("legend").replaceChildren(...Object.entries(words).map(([name, text]) => make("span", {style: `--c: var(--${name})`}, text)),
    ...(answer.row ? [make("span", {style: "--c: var(--row)"}, `seen by query ${number(answer.row.query)}`)] : []));
}
function drawQuery() {
  const row = answer.row;
  drawStrips();
  if (!row) { at("sees").textContent = "Click a row of the mask, or write a number, to see what one query sees."; return; }
  const runs = row.runs.map(([from, to]) => from === to ? number(from) : `${number(from)}–${number(to)}`).join(", ");
  at("sees").textContent = `Query ${number(row.query)} of head ${answer.head} sees ${number(row.keys)} ${row.keys === 1 ? "key" : "keys"}` +
    (row.keys ? `: ${runs}${row.more_runs ? ` and ${number(row.more_runs)} more runs` : ""}.` : ".");
  at("reach").querySelector("tbody").replaceChildren(...row.reach.map(({layer, tokens, first, last}) =>
    make("tr", {}, make("th", {scope: "row"}, String(layer)), ...[tokens, first, last].map(value => make("td", {}, value === null ? "–" : number(value))))));
}
function drawFigures() {
  const big = [["of the pairs", share(answer.density)], ["of the blocks", share(answer.block_density)], ["active blocks", number(answer.active_blocks)]];
  at("big").replaceChildren(...pairs(big));
  const [q, k] = answer.block_size, [nq, nk] = answer.blocks_a_side, cost = answer.cost, dense = answer.dense;
  const training = at("training").checked;
  at("rows").replaceChildren(...pairs([
    ["Blocks", `${number(nq)} × ${number(nk)} of ${q} × ${k} tokens`],
    ["Full, partial", `${number(answer.full_blocks)}, ${number(answer.partial_blocks)}`],
    ["Lists of blocks", answer.lists > 1 ? `${answer.lists}, one a head` : "one for all heads"],
    ["Tensors", `${answer.batch} × ${number(answer.tokens)} × ${answer.heads}${answer.heads_kv < answer.heads ? ` (keys ${answer.heads_kv})` : ""} × ${answer.head_dim}`],
    ["Forward", `${flops(cost.forward_flops)}, ${bytes(cost.forward_bytes)}`],
    ["Backward", `${flops(cost.backward_flops)}, ${bytes(cost.backward_bytes)}`],
    ...(answer.mass ? [["Mass kept by the choice", share(answer.mass.chosen)]] : []),
    ...(answer.mass && "pattern" in answer.mass ? [[`Mass kept by the pattern, ${share(answer.mass.density)} of the pairs`, share(answer.mass.pattern)]] : []),
  ]));
  const fewer = dense.times === null ? "no pairs at all" : dense.times < 1 ? `${(1 / dense.times).toFixed(2)} × as much` : `1 ⁄ ${dense.times.toLocaleString("en", {maximumFractionDigits: 1})}`;
  at("dense").replaceChildren(...pairs([
    ["Work, of dense", fewer],
    ["Dense forward", dense.forward_flops === null ? "–" : flops(dense.forward_flops)],
    ...(training ? [["Dense backward", dense.backward_flops === null ? "–" : flops(dense.backward_flops)]] : []),
    ["Dense peak, fused kernel", bytes(dense.peak_bytes)],
    ["All scores written out", bytes(dense.scores_bytes)],
  ]));
}
function drawMemory() {
  const plan = answer.plan, most = plan.peak_bytes;
  const bars = Object.entries(plan.phases).flatMap(([phase, total]) => [
    make("div", {className: "phase"}, make("span", {}, phase), make("span", {}, bytes(total))),
    make("div", {className: "bar", role: "img", ariaLabel: `${phase}: ${bytes(total)}`}, ...Object.entries(options.kinds).map(([kind, tint]) => {
      const size = plan.items.filter(item => item.kind === kind && item.phases.includes(phase)).reduce((sum, item) => sum + item.bytes, 0);
      return make("i", {title: `${kind}: ${bytes(size)}`, style: `background:${tint};width:${100 * size / most}%`});
    })),
  ]);
  const used = Object.entries(options.kinds).filter(([kind]) => plan.items.some(item => item.kind === kind));
  const legend = make("p", {className: "legend"}, ...used.map(([kind, tint]) => make("span", {style: `--c:${tint}`}, kind)));
  const verdict = `${plan.fits ? "Fits" : "Does not fit"} ${plan.device}: ${bytes(most)} of ${bytes(plan.budget_bytes)}, ${plan.backend} backend.`;
  at("memory").replaceChildren(...bars, legend,
    make("p", {className: "verdict" + (plan.fits ? "" : " no")}, verdict),
    make("details", {}, make("summary", {}, "Every tensor"), make("table", {}, make("tbody", {}, ...plan.items.map(item =>
      make("tr", {}, make("th", {scope: "row", style: `--c:${options.kinds[item.kind]}`}, item.name), make("td", {}, bytes(item.bytes))))))));
}
function drawCode() {
  for (const button of document.querySelectorAll("[data-tab]")) button.setAttribute("aria-pressed", String(button.dataset.tab === tab));
  at("code").textContent = answer[tab];
}
