// Formatting of numbers, and the only functions that create elements: text is always set as text, never as markup.
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function digits(value, places = 4) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0*e/, "e").replace("e+", "e").replaceAll("-", "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(places)));
}

function count(value) {
  if (!isNumber(value)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
  }
  return String(Number(value.toPrecision(3)));
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1) return value < 0.001 ? "0 s" : Number((value * 1000).toPrecision(3)) + " ms";
  if (value < 10) return Number(value.toPrecision(3)) + " s";
  const whole = Math.round(value);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " m " + two(whole % 60) + " s";
  if (whole < 86400) return Math.floor(whole / 3600) + " h " + two(Math.floor((whole % 3600) / 60)) + " m";
  return Math.floor(whole / 86400) + " d " + two(Math.floor((whole % 86400) / 3600)) + " h";
}

const age = (value) => (isNumber(value) && value < 60 ? Math.max(0, Math.round(value)) + " s" : seconds(value));
const percent = (value, places = 1) => (isNumber(value) ? (value * 100).toFixed(places) + "%" : "–");
const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : "–");
const clock = (time) => (isNumber(time) ? new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "–");

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") node.textContent = value;
    else if (key.startsWith("--") || key === "width%") node.style.setProperty(key === "width%" ? "width" : key, key === "width%" ? value + "%" : value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

function table(heads, rows) {
  const body = rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { class: (heads[i].n ? "n " : "") + ((cell && cell.class) || ""), text: cell && cell.class ? cell.text : String(cell ?? "–") }))));
  return [el("thead", {}, el("tr", {}, heads.map((head) => el("th", { class: head.n ? "n" : "", text: head.text, scope: "col" })))), el("tbody", {}, body)];
}
