// The state is in the address, so that a link shows the same view. Data comes from the server every two seconds.
const CHARTS = [
  { key: "loss", title: "Loss", wide: true, format: (v) => digits(v), names: ["loss", "valid_loss"], logs: true },
  { key: "grad_norm", title: "Gradient norm", format: (v) => digits(v, 3), names: ["grad_norm"], logs: true },
  { key: "lr", title: "Learning rate", format: (v) => digits(v, 3), names: ["lr"] },
  { key: "tokens_per_s", title: "Tokens per second", format: count, names: ["tokens_per_s"] },
  { key: "mfu", title: "Model FLOPs utilisation", format: (v) => percent(v), names: ["mfu"], optional: true },
  { key: "reward", title: "Reward", format: (v) => digits(v, 3), names: ["reward_mean", "reward_margin", "reward_accuracy"], optional: true },
  { key: "kl", title: "KL divergence to the reference", format: (v) => digits(v, 3), names: ["kl"], optional: true },
  { key: "response_length", title: "Response length", unit: "tokens", format: (v) => digits(v, 3), names: ["response_length"], optional: true },
  { key: "expert_load", title: "Load of experts", format: (v) => digits(v, 3), names: ["expert_load_max", "expert_load_entropy"], optional: true },
  { key: "split", title: "Where a step's time goes", unit: "", format: seconds, stack: true, names: ["data", "compute", "communication", "save"].map((p) => "split." + p) },
  { key: "memory_gib", title: "Peak memory", unit: "GiB", format: (v) => digits(v, 3), names: ["memory_gib"] },
];
const state = { run: "", overlay: [], log: false, smooth: "0.9", range: null };
// `change` counts the visitor's actions: an answer to a request from before the last action is dropped.
const known = { runs: [], view: null, series: null, version: "", change: 0, config: "", logs: "", answered: Date.now(), asked: Date.now() };
const SLOW_MS = 8000, TIMEOUT_MS = 60000;
const charts = CHARTS.map((spec) => new Chart(spec, { hover: (at, active) => charts.forEach((chart) => chart.hover(at, chart === active)), zoom: setRange }));
byId("charts").append(...charts.map((chart) => chart.node));

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  state.run = given.get("run") || "";
  state.overlay = (given.get("over") || "").split("/").filter(Boolean);
  state.log = given.get("log") === "1";
  state.smooth = given.get("smooth") || "0.9";
  const range = (given.get("range") || "").split("~").map(Number);
  state.range = range.length === 2 && range.every(Number.isFinite) && range[1] > range[0] ? range : null;
}

function writeAddress() {
  const kept = new URLSearchParams();
  if (state.run) kept.set("run", state.run);
  if (state.overlay.length) kept.set("over", state.overlay.join("/"));
  if (state.log) kept.set("log", "1");
  if (state.smooth !== "0.9") kept.set("smooth", state.smooth);
  if (state.range) kept.set("range", state.range.map((v) => Math.round(v)).join("~"));
  history.replaceState(null, "", "#" + kept);
}

// An unreachable server may come back; an error does not go away. The message says which of them it is.
const SILENT = "The server does not answer. The page continues when it does.";
class PageError extends Error {}

async function ask(path, values) {
  known.asked = Date.now();
  let answer, text;
  try {
    // A connection that broke while the machine slept never answers: without a timeout the page would wait forever.
    answer = await fetch(path + "?" + new URLSearchParams(values), { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    text = await answer.text();
  } catch { throw new PageError(SILENT); }
  if (!answer.ok) throw new PageError(`The server reports: ${text.trim()}.`);
  known.answered = Date.now();
  return JSON.parse(text);
}

async function loadRuns() {
  const answer = await ask("/api/runs", {});
  known.runs = answer.runs;
  byId("folder").textContent = answer.runs_dir;
  chooseExisting();
  drawRuns();
}

// Without a run in the address, or if that run is gone, show the newest.
function chooseExisting() {
  if (known.runs.some((run) => run.name === state.run)) return;
  state.run = known.runs.length ? known.runs[0].name : "";
  known.version = ""; known.change += 1;
}

async function loadView() {
  if (!state.run) { byId("verdict").replaceChildren(el("span", { class: "word", text: "no runs yet" }), el("p", { class: "why", text: "A run appears here as soon as it writes its first file." })); return; }
  const asked = known.change;
  const wide = Math.min(1200, Math.max(200, Math.round((charts[0].plot.clientWidth || 800) / 1.4)));
  const values = { run: state.run, overlay: state.overlay.join("/"), points: wide, smooth: state.smooth, version: known.version };
  if (state.range) [values.from, values.to] = state.range;
  const answer = await ask("/api/view", values);
  if (asked !== known.change) return;
  known.view = answer.run; known.version = answer.version;
  if (answer.series) { known.series = answer.series; drawCharts(); }
  for (const draw of [drawVerdict, drawFigures, drawTimeline, drawGoodput, drawEvents, drawRanks, drawEvaluations, drawData, drawLeaderboard, drawSamples]) draw(answer.run);
  if (known.config !== state.run + "/" + byId("against").value) await loadConfig();
  if (byId("logs-open").open && known.logs !== state.run) await loadLogs();
  document.body.dataset.ready = "yes";
}

async function loadConfig() {
  const run = state.run, against = byId("against").value;
  const answer = await ask("/api/config", { run, against });
  if (run !== state.run || against !== byId("against").value) return;
  known.config = run + "/" + against;
  drawConfig(answer, against);
}

async function loadLogs() {
  const run = state.run;
  const answer = await ask("/api/logs", { run });
  if (run !== state.run) return;
  known.logs = run;
  drawLogs(answer);
}

function drawCharts() {
  const names = [state.run, ...state.overlay].filter((name) => known.series[name]);
  const faults = known.view.events.filter((event) => event.kind === "fault" && isNumber(event.step)).map((event) => event.step);
  for (const chart of charts) {
    const spec = chart.spec, many = names.length > 1;
    const series = spec.stack
      ? spec.names.filter((name) => known.series[state.run][name]).map((name, i) => ({ name: PARTS[name.slice(6)], tone: ["t4", "t0", "t3", "t1"][spec.names.indexOf(name)], data: known.series[state.run][name] }))
      : names.flatMap((run, i) => spec.names.filter((name) => known.series[run][name]).map((name) => {
        const valid = name.startsWith("valid");
        return { name: many ? run : valid ? "validation" : "training", tone: "t" + ((many ? i : valid ? 1 : 0) % 8), data: known.series[run][name], points: valid, quiet: many && valid };
      }));
    chart.log = Boolean(spec.logs && state.log);
    chart.node.hidden = Boolean(spec.optional && !series.length);
    chart.show(series, state.range, spec.key === "loss" && !many ? faults : []);
  }
}

function drawRuns() {
  const focused = document.activeElement.dataset.place;
  byId("runs").replaceChildren(...known.runs.map((run) => {
    const over = [state.run, ...state.overlay].indexOf(run.name), current = run.name === state.run;
    const unsaved = ["finished", "stopped", "failed"].includes(run.state) && run.saved_step < run.step;
    const figures = unsaved ? `${run.saved_step < 0 ? "no step" : "step " + whole(run.saved_step)} of ${whole(run.step)} on disk` : `${run.step < run.total_steps ? percent(run.step / run.total_steps, 0) + ", " : ""}loss ${digits(run.loss)}`;
    const about = `${run.state}, ${figures}`;
    return el("li", { class: current ? "current" : "" },
      el("button", { class: "open", type: "button", "data-place": "open " + run.name, "aria-current": current ? "true" : null, onclick: () => choose(run.name) }, el("span", { class: "dot " + run.state }), el("span", { class: "name", text: run.name }), el("span", { class: "about", text: about })),
      current ? null : el("label", { class: "over", title: "Compare with the current run", "--swatch": `var(--c${Math.max(0, over) % 8})` }, el("input", { type: "checkbox", "data-place": "over " + run.name, checked: over > 0, "aria-label": `compare with ${run.name}`, onchange: () => overlay(run.name) })));
  }));
  // The focused element was just replaced: focus its successor, or Tab would start at the top.
  if (focused) [...document.querySelectorAll("[data-place]")].find((node) => node.dataset.place === focused)?.focus({ preventScroll: true });
  const against = byId("against"), chosen = against.value;
  against.replaceChildren(el("option", { value: "", text: "none" }), ...known.runs.filter((run) => run.name !== state.run).map((run) => el("option", { value: run.name, text: run.name, selected: run.name === chosen })));
}

function changed() { known.version = ""; known.change += 1; writeAddress(); byId("log").setAttribute("aria-pressed", state.log); byId("smooth").value = state.smooth; byId("reset").hidden = !state.range; refresh(); }
function choose(name) { if (!name) return; state.overlay = state.overlay.filter((other) => other !== name); state.run = name; state.range = null; drawRuns(); changed(); }
function overlay(name) { state.overlay = state.overlay.includes(name) ? state.overlay.filter((other) => other !== name) : [...state.overlay, name]; drawRuns(); changed(); }
function setRange(range) { state.range = range && range[1] - range[0] >= 2 ? [Math.max(0, Math.floor(range[0])), Math.ceil(range[1])] : null; changed(); }
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme;
  try { localStorage.setItem("keepstep-theme", theme); } catch { /* private windows have no storage */ }
}

const THEMES = ["auto", "light", "dark"], SMOOTHS = ["0", "0.6", "0.9", "0.98"];
const following = (list, item) => list[(list.indexOf(item) + 1) % list.length];
const neighbour = (by) => { const at = known.runs.findIndex((run) => run.name === state.run); return (known.runs[(at + by + known.runs.length) % known.runs.length] || {}).name; };
const KEYS = {
  j: () => choose(neighbour(1)), k: () => choose(neighbour(-1)), o: () => { const name = neighbour(1 + state.overlay.length); if (name && name !== state.run) overlay(name); },
  l: () => { state.log = !state.log; changed(); }, s: () => { state.smooth = following(SMOOTHS, state.smooth); changed(); },
  0: () => setRange(null), t: () => setTheme(following(THEMES, byId("theme").textContent)), p: () => print(), "?": () => byId("keys").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || byId("keys").open) return;
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
});
byId("log").addEventListener("click", KEYS.l);
byId("reset").addEventListener("click", KEYS[0]);
byId("theme").addEventListener("click", KEYS.t);
byId("help").addEventListener("click", KEYS["?"]);
byId("smooth").addEventListener("change", (event) => { state.smooth = event.target.value; changed(); });
byId("against").addEventListener("change", () => refresh());
byId("logs-open").addEventListener("toggle", () => { known.logs = ""; refresh(); });
// Not by a link: it would replace the address that holds the state.
byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
addEventListener("hashchange", () => { readAddress(); chooseExisting(); drawRuns(); changed(); });
addEventListener("beforeprint", () => charts.forEach((chart) => chart.draw()));

let working = false, again = false;
async function refresh(listToo = false) {
  if (working) { again = true; return; }
  working = true;
  try {
    if (listToo) await loadRuns();
    do { again = false; await loadView(); } while (again);
    byId("offline").hidden = true;
  } catch (error) {
    showError(error instanceof PageError ? error.message : `This page cannot show the run: ${error.message}.`);
  }
  working = false;
}
function showError(why) {
  byId("offline").hidden = false;
  byId("offline-why").textContent = why;
  byId("offline-age").textContent = seconds((Date.now() - known.answered) / 1000);
}
async function begin() {
  readAddress();
  try { setTheme(localStorage.getItem("keepstep-theme") || "auto"); } catch { setTheme("auto"); }
  await loadRuns().catch(() => {});
  changed();
  let ticks = 0;
  setInterval(() => {
    ticks += 1;
    // A hidden page polls five times less often.
    if (document.hidden && ticks % 5) return;
    if (!working) refresh(ticks % 2 === 0);
    else if (Date.now() - known.asked > SLOW_MS) showError(SILENT);
  }, 2000);
}
begin();
