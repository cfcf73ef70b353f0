"use strict";
/* What every part of the page uses. */
const at = id => document.getElementById(id);
const make = (tag, options = {}, ...inside) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options))
    name === "style" ? made.style.cssText = value : name in made ? made[name] = value : made.setAttribute(name, value);
  made.append(...inside);
  return made;
};
const number = value => value.toLocaleString("en");
const share = value => (100 * value).toPrecision(value && value < 0.001 ? 2 : 3).replace(/\.?0+$/, "") + " %";
const scaled = (value, step, units) => {
  let i = 0;
  while (value >= step && i < units.length - 1) { value /= step; i++; }
  return value.toLocaleString("en", {maximumFractionDigits: 1, minimumFractionDigits: i ? 1 : 0}) + " " + units[i];
};
const bytes = value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const flops = value => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

/* Colours of the style sheet as [red, green, blue]. */
const pixel = make("canvas", {width: 1, height: 1}).getContext("2d", {willReadFrequently: true});
function colour(name) {
  pixel.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  pixel.fillRect(0, 0, 1, 1);
  return [...pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}
const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

/* What the page knows: what there is to pick, the terms on the left, the last answer, and where one looks. */
const NUMBERS = ["tokens", "heads", "heads_kv", "head_dim", "batch", "head", "query", "layers", "kept"];
const CHOICES = ["block_size", "dtype", "device", "scorer", "budget"], FLAGS = ["causal", "training"];
const OF_VIEW = ["head", "query", "layers"];  // these leave the figures as they are
let options, terms, answer, tab = "code", cursor = null;
const view = {query: 0, key: 0, span: 0};  // tokens
