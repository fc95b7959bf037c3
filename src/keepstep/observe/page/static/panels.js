// All panels except the charts. Each function draws one panel from the values of the server.
const SENTENCES = {
  healthy: "The run is healthy.", degraded: "The run has a problem.", recovering: "The run is recovering.", starting: "The run has not done a step yet.",
  stalled: "The run does not report any more.", stopped: "The run saved and stopped.", failed: "The run failed and will not resume by itself.", finished: "The run is finished.",
};
const PARTS = { data: "data", compute: "compute", communication: "communication", save: "save" };

function drawVerdict(run) {
  const v = run.verdict, share = v.total_steps ? Math.min(1, v.step / v.total_steps) : 0;
  const node = byId("verdict");
  node.className = "verdict " + v.state; node.dataset.state = v.state;
  node.replaceChildren(
    el("span", { class: "word", text: v.state }), el("span", { class: "run", text: run.name }),
    el("span", { class: "muted", text: `step ${whole(v.step)}${v.total_steps ? " of " + whole(v.total_steps) : ""}` }),
    el("p", { class: "why", text: v.reasons.length ? v.reasons.join("; ") + "." : SENTENCES[v.state] }),
    el("div", { class: "bar" }, el("i", { "width%": (share * 100).toFixed(2) })));
  document.title = `${v.total_steps ? Math.floor(share * 100) + "% " : ""}${v.state} · ${run.name} · keepstep`;
}

function drawFigures(run) {
  const v = run.verdict, now = run.now || {};
  const figure = (label, value, note) => el("div", {}, el("div", { class: "label", text: label }), el("div", { class: "value", text: value, "data-figure": label }), el("div", { class: "note", text: note || "" }));
  const live = !["finished", "stopped", "failed"].includes(v.state);
  const last = run.evaluations[run.evaluations.length - 1];
  byId("figures").replaceChildren(
    figure("loss", digits(v.loss, 5), last ? `validation ${digits(last.valid_loss, 5)}` : ""),
    live ? figure("time left", seconds(v.eta_s), isNumber(v.eta_s) ? "until " + new Date(Date.now() + v.eta_s * 1000).toLocaleString("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" }) : "") : figure("took", seconds(run.goodput.wall_s), ""),
    figure("tokens/s", count(now.tokens_per_s), now.tokens ? count(now.tokens) + " tokens so far" : ""),
    isNumber(now.mfu) ? figure("MFU", percent(now.mfu), now.memory_gib ? digits(now.memory_gib, 3) + " GiB" : "") : figure("memory", now.memory_gib ? digits(now.memory_gib, 3) + " GiB" : "–"),
    figure("on disk", v.saved_step < 0 ? "nothing yet" : "step " + whole(v.saved_step), [v.saved_step < 0 ? "" : age(v.checkpoint_age_s) + " ago", v.skipped_saves ? `${v.skipped_saves} save${v.skipped_saves > 1 ? "s" : ""} skipped` : ""].filter(Boolean).join(", ")),
    figure(live ? "lost if killed now" : "not in a checkpoint", seconds(v.at_risk_s), whole(v.at_risk_steps) + " steps"),
    figure("goodput", percent(run.goodput.share), v.restarts ? `${v.restarts} restart${v.restarts > 1 ? "s" : ""}` : "no restart"));
}

function drawTimeline(run) {
  const segments = run.goodput.segments, host = byId("timeline");
  const happened = run.events.filter((event) => isNumber(event.time));
  if (!segments.length) { host.replaceChildren(el("p", { class: "muted", text: "no events yet" })); return; }
  const first = segments[0][0], last = Math.max(segments[segments.length - 1][1], first + 1), width = Math.max(300, host.clientWidth);
  const x = (time) => (Math.min(last, Math.max(first, time)) - first) / (last - first) * width;
  const root = svg("svg", { viewBox: `0 0 ${width} 74`, role: "img", "aria-label": "Timeline of the run" });
  for (const [start, end, cause] of segments) root.append(svg("rect", { class: cause, x: x(start), y: 26, width: Math.max(1, x(end) - x(start)), height: 22, rx: 3 }, svg("title", { text: `${cause}: ${seconds(end - start)}` })));
  const drawn = new Set();
  for (const event of happened) {
    if (event.kind === "checkpoint_started") continue;
    const at = x(event.time), spot = event.kind + Math.round(at / 2);
    if (drawn.has(spot)) continue;
    drawn.add(spot);
    const tall = ["fault", "restart", "resize", "left", "finish", "warning", "stop"].includes(event.kind);
    root.append(svg("line", { class: "tick " + event.kind, x1: at, x2: at, y1: tall ? 8 : 17, y2: 25 }, svg("title", { text: `${event.kind}${event.step != null ? " at step " + event.step : ""}, ${clock(event.time)}` })));
  }
  const label = (share) => svg("text", { x: share * width, y: 66, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle", text: seconds((last - first) * share) });
  root.append(label(0), label(0.5), label(1));
  host.replaceChildren(root);
}

function drawGoodput(run) {
  const { seconds: by, causes, wall_s: wall } = run.goodput;
  const shown = Object.keys(causes).filter((cause) => by[cause] > 0);
  byId("goodput").replaceChildren(
    el("div", { class: "share" }, shown.map((cause) => el("i", { class: cause, "width%": (by[cause] / wall * 100).toFixed(3), title: causes[cause] }))),
    el("div", { class: "causes" }, shown.map((cause) => el("span", { class: "cause " + cause, title: causes[cause] }, el("i"), `${cause} ${percent(by[cause] / wall)} `, el("span", { class: "muted", text: seconds(by[cause]) })))));
}

function drawEvents(run) {
  byId("events-title").textContent = `Events (${run.events_total})`;
  const facts = (event) => Object.entries(event).filter(([key]) => !["time", "kind", "step", "rank", "traceback"].includes(key)).map(([key, value]) => `${key} ${isNumber(value) ? digits(value) : typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  const rows = [...run.events].reverse().map((event) => [clock(event.time), { class: "kind " + event.kind, text: String(event.kind).replaceAll("_", " ") }, event.step ?? "–", event.rank ?? "–", facts(event)]);
  byId("events").replaceChildren(...table([{ text: "time" }, { text: "event" }, { text: "step", n: 1 }, { text: "rank", n: 1 }, { text: "" }], rows));
}

function drawRanks(run) {
  const { own_s: own = [], memory_gib: memory = [], host = [], data_s: data = [] } = run.ranks || {};
  byId("ranks-card").hidden = !own.length;
  if (!own.length) return;
  const median = [...own].sort((a, b) => a - b)[Math.floor(own.length / 2)] || 1e-9, slow = run.verdict.straggler;
  const sentence = slow.rank !== undefined
    ? `Rank ${slow.rank}${slow.host ? " on " + slow.host : ""} is the straggler: ${slow.ratio.toFixed(2)} times the median of ${seconds(median)}.`
    : `No straggler: all ${own.length} ranks are near the median of ${seconds(median)}.`;
  const cell = own.length > 2048 ? 8 : own.length > 256 ? 14 : 30;
  const grid = el("div", { class: "rankgrid", "--cell": cell + "px", "--columns": own.length > 256 ? 64 : 32 }, own.map((time, i) => {
    const heat = Math.min(100, Math.max(0, (time / median - 1) * 200));
    const about = `rank ${i}${host[i] ? " on " + host[i] : ""}: ${seconds(time)}${isNumber(data[i]) ? ", waited for data " + seconds(data[i]) : ""}${isNumber(memory[i]) ? ", " + digits(memory[i], 3) + " GiB" : ""}`;
    return el("i", { class: slow.rank === i ? "slow" : "", "--heat": heat.toFixed(0) + "%", title: about, text: cell > 20 ? i : "" });
  }));
  byId("ranks").replaceChildren(el("p", { class: slow.rank !== undefined ? "" : "muted", text: sentence }), grid);
}

function drawEvaluations(run) {
  const rows = [...run.evaluations].reverse();
  byId("evaluations-card").hidden = !rows.length;
  const names = rows.length ? Object.keys(rows[0]).filter((name) => name !== "step") : [];
  byId("evaluations").replaceChildren(el("table", {}, table([{ text: "step", n: 1 }, ...names.map((text) => ({ text: text.replaceAll("_", " "), n: 1 }))], rows.map((row) => [whole(row.step), ...names.map((name) => digits(row[name], 5))]))));
}

function drawData(run) {
  const sources = Object.entries(run.sources || {}), now = run.now || {};
  const most = Math.max(1, ...sources.map(([, s]) => (isNumber(s) ? s : s.samples || 0)));
  byId("data-card").hidden = !sources.length && !isNumber(now.samples);
  const bars = sources.map(([name, value]) => {
    const samples = isNumber(value) ? value : value.samples, epoch = isNumber(value) ? null : value.epoch;
    return el("div", { class: "source" }, el("span", { text: name }), el("div", { class: "meter" }, el("i", { "width%": (isNumber(epoch) ? (epoch % 1) * 100 : samples / most * 100).toFixed(1) })), el("span", { class: "muted", text: whole(samples) + " samples" + (isNumber(epoch) ? `, epoch ${epoch.toFixed(2)}` : "") }));
  });
  byId("data").replaceChildren(...bars, el("p", { class: "muted", text: `position ${whole(now.samples)} samples, ${count(now.tokens)} tokens` }));
}

function drawLeaderboard(run) {
  const { heads, rows } = run.leaderboard;
  byId("leaderboard-card").hidden = !rows.length;
  byId("leaderboard").replaceChildren(el("table", {}, table(heads.map((text, at) => ({ text, n: at ? 1 : 0 })), rows)));
}

function drawSamples(run) {
  byId("samples-card").hidden = !run.samples.length;
  byId("samples").replaceChildren(...run.samples.map((sample) => el("div", { class: "sample" }, el("small", { text: "step " + whole(sample.step) }), el("pre", {}, el("span", { class: "prompt", text: String(sample.prompt ?? "") }), el("span", { text: String(sample.text ?? "") })))));
}

function drawConfig(answer, against) {
  byId("config").textContent = answer.text || "the run wrote no configuration";
  const rows = answer.difference;
  const value = (item) => (item === null || item === undefined ? "–" : typeof item === "object" ? JSON.stringify(item) : String(item));
  byId("difference").replaceChildren(...(!rows ? [] : rows.length
    ? [el("table", {}, table([{ text: "field" }, { text: against }, { text: "this run" }], rows.map((row) => [row.key, value(row.left), value(row.right)])))]
    : [el("p", { class: "muted", text: "no differences" })]));
}

function drawLogs(answer) {
  const first = answer.first_traceback;
  const lines = answer.lines.map((line) => `${new Date(line.time * 1000).toLocaleTimeString("en-GB")}  ${String(line.level).padEnd(7)}  ${line.role}/${line.rank}  ${line.text}`).join("\n");
  byId("logs").replaceChildren(
    first ? el("div", { class: "traceback" }, el("b", { text: `First error: ${first.role}/${first.rank}, ${clock(first.time)}` }), el("pre", { text: first.traceback })) : "",
    el("pre", { class: "scroll", text: lines || "no logs yet" }));
}
