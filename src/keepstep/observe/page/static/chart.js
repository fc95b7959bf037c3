// A line chart as SVG: a pale band from the smallest to the largest value in each piece, with the average on top.
// Room for a whole marker at the first and at the last step: its radius and half of its outline.
const MARK = 4.4;

function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const m of high - low > 3 ? [1] : [1, 2, 5]) {
      const value = Math.log10(m) + power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length > 2 ? found : ticks(10 ** low, 10 ** high, 5).filter((v) => v > 0).map(Math.log10);
}

function nearest(steps, wanted) {
  let first = 0, last = steps.length - 1;
  while (first < last) {
    const middle = (first + last) >> 1;
    if (steps[middle] < wanted) first = middle + 1; else last = middle;
  }
  return first > 0 && wanted - steps[first - 1] < steps[first] - wanted ? first - 1 : first;
}

class Chart {
  constructor(spec, on) {
    this.spec = spec; this.on = on; this.series = []; this.log = false; this.range = null;
    this.legend = el("div", { class: "legend" });
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img" });
    this.node = el("figure", { class: "chart" + (spec.wide ? " wide" : ""), "data-chart": spec.key }, el("figcaption", {}, el("b", { text: spec.title }), el("span", { class: "muted", text: spec.unit || "" }), this.legend), this.plot);
    this.tip = el("div", { class: "tip", hidden: true });
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.moved(event));
    this.plot.addEventListener("pointerdown", (event) => { if (event.button === 0) { this.from = this.stepAt(event); this.plot.setPointerCapture(event.pointerId); } });
    this.plot.addEventListener("pointerup", (event) => this.released(event));
    this.plot.addEventListener("pointercancel", () => { this.from = null; this.on.hover(null); });
    this.plot.addEventListener("pointerleave", () => { if (this.from == null) this.on.hover(null); });
    this.plot.addEventListener("dblclick", () => this.on.zoom(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  // series: [{name, tone, data: {steps, low, high, raw, smooth}, points}]; marks: steps of faults.
  show(series, range, marks) { this.series = series; this.range = range; this.marks = marks || []; this.draw(); }

  stepAt(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - this.left) / Math.max(1, this.inner);
    return this.first + Math.min(1, Math.max(0, share)) * (this.last - this.first);
  }

  moved(event) {
    if (!this.inner) return;
    const at = this.stepAt(event);
    if (this.from != null && this.overlay) {
      const a = this.x(Math.min(this.from, at)), b = this.x(Math.max(this.from, at));
      this.selection.setAttribute("x", a); this.selection.setAttribute("width", Math.max(0, b - a));
    }
    this.on.hover(at, this);
  }

  released(event) {
    const from = this.from; this.from = null;
    if (from == null) return;
    const to = this.stepAt(event);
    if (Math.abs(this.x(to) - this.x(from)) > 8) this.on.zoom([Math.min(from, to), Math.max(from, to)]);
    else if (this.selection) this.selection.setAttribute("width", 0);
  }

  key(event) {
    const span = this.last - this.first, at = this.at ?? this.last;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) { this.on.hover(Math.min(this.last, Math.max(this.first, at + moves[event.key] * span / (event.shiftKey ? 10 : 100))), this); event.preventDefault(); }
    else if (event.key === "+" || event.key === "=") this.on.zoom([at - span / 4, at + span / 4]);
    else if (event.key === "-") this.on.zoom([Math.max(0, this.first - span / 2), this.last + span / 2]);
    else if (event.key === "Escape") this.on.hover(null);
  }

  bounds() {
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    const stacked = this.spec.stack;
    for (const { data } of this.series) {
      for (let i = 0; i < data.steps.length; i++) {
        const step = data.steps[i];
        first = Math.min(first, step); last = Math.max(last, step);
        if (this.range && (step < this.range[0] || step > this.range[1])) continue;
        const bottom = this.log ? (data.low[i] > 0 ? data.low[i] : data.smooth[i]) : data.low[i];
        if (!this.log || bottom > 0) low = Math.min(low, stacked ? 0 : bottom);
        if (!stacked) high = Math.max(high, data.high[i]);
      }
    }
    if (stacked && this.series.length) {
      const total = this.series[0].data.steps.map((_, i) => this.series.reduce((sum, s) => sum + (s.data.smooth[i] || 0), 0));
      high = Math.max(...total) * 1.02;
    }
    if (this.range) [first, last] = this.range;
    return [low, high, first, last];
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width) return;
    let [low, high, first, last] = this.bounds();
    if (!isNumber(low) || !isNumber(high)) { this.inner = 0; this.plot.replaceChildren(el("div", { class: "empty", text: "no values yet" })); this.legend.replaceChildren(); return; }
    const scale = this.log && low > 0 ? Math.log10 : (v) => v;
    this.scale = (v) => scale(Math.max(v, this.log ? low : -Infinity));
    low = scale(low); high = scale(high);
    if (high - low < 1e-12) { const half = Math.abs(low) * 0.05 || 0.5; low -= half; high += half; }
    const room = (high - low) * 0.04; if (!this.spec.stack) { low -= room; high += room; }
    if (last <= first) last = first + 1;
    Object.assign(this, { first, last, left: 52, inner: width - 62 });
    const top = 8, bottom = height - 22;
    this.x = (step) => this.left + (step - first) / (last - first) * this.inner;
    this.y = (value) => bottom - (this.scale(value) - low) / (high - low) * (bottom - top);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const logged = scale === Math.log10;
    for (const value of (logged ? logTicks(low, high) : ticks(low, high, height / 48))) {
      const y = bottom - (value - low) / (high - low) * (bottom - top);
      root.append(svg("line", { class: "grid", x1: this.left, x2: width - 10, y1: y, y2: y }), svg("text", { x: this.left - 8, y: y + 4, "text-anchor": "end", text: this.spec.format(logged ? 10 ** value : value) }));
    }
    for (const value of ticks(first, last, width / 110)) root.append(svg("text", { x: this.x(value), y: height - 5, "text-anchor": "middle", text: count(value) }));
    const clip = "clip-" + this.spec.key;
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: this.left - MARK, y: 0, width: this.inner + 2 * MARK, height: bottom + MARK })));
    const field = svg("g", { "clip-path": `url(#${clip})` });
    for (const step of this.marks) field.append(svg("line", { class: "event-line", x1: this.x(step), x2: this.x(step), y1: top, y2: bottom }));
    if (this.spec.stack) this.stack(field); else this.lines(field);
    this.overlay = svg("g", {}); this.selection = svg("rect", { class: "select", y: top, height: bottom - top, width: 0 });
    field.append(this.selection, this.overlay); root.append(field);
    this.plot.replaceChildren(root, this.tip);
    this.legend.replaceChildren(...(this.series.length > 1 ? this.series.filter((s) => !s.quiet).map((s) => el("span", { class: s.tone }, el("i"), s.name)) : []));
    this.plot.setAttribute("aria-label", this.spec.title + ": " + this.series.map((s) => `${s.name} ${this.spec.format(s.data.raw[s.data.raw.length - 1])}`).join(", "));
    if (this.at != null) this.hover(this.at, this.active);
  }

  lines(field) {
    const bands = [], lines = [];
    for (const { data, tone, points } of this.series) {
      const n = data.steps.length;
      if (points) { for (let i = 0; i < n; i++) lines.push(svg("circle", { class: "mark " + tone, cx: this.x(data.steps[i]), cy: this.y(data.raw[i]), r: n > 60 ? 2 : MARK - 1 })); continue; }
      const up = [], down = [], line = [];
      for (let i = 0; i < n; i++) {
        const x = this.x(data.steps[i]).toFixed(1);
        up.push(`${x},${this.y(data.high[i]).toFixed(1)}`); down.push(`${x},${this.y(data.low[i]).toFixed(1)}`); line.push(`${x},${this.y(data.smooth[i]).toFixed(1)}`);
      }
      bands.push(svg("path", { class: "band " + tone, d: "M" + up.join("L") + "L" + down.reverse().join("L") + "Z" }));
      lines.push(svg("path", { class: "line " + tone, d: "M" + line.join("L") + (n === 1 ? "h1" : "") }));
    }
    field.append(...bands, ...lines);
  }

  stack(field) {
    const n = this.series.length ? this.series[0].data.steps.length : 0;
    let under = new Array(n).fill(0);
    for (const { data, tone } of this.series) {
      const over = under.map((value, i) => value + (data.smooth[i] || 0));
      const path = (values) => values.map((value, i) => `${this.x(data.steps[i]).toFixed(1)},${this.y(value).toFixed(1)}`);
      field.append(svg("path", { class: "area " + tone, d: "M" + path(over).join("L") + "L" + path(under).reverse().join("L") + "Z" }));
      under = over;
    }
  }

  // All charts show the cross line; only the one under the pointer shows the numbers.
  hover(at, active) {
    this.at = at; this.active = active;
    if (!this.overlay || !this.inner) return;
    if (at == null || at < this.first || at > this.last) { this.overlay.replaceChildren(); this.tip.hidden = true; return; }
    const rows = [], dots = [];
    const end = Math.max(...this.series.map(({ data }) => data.steps.at(-1) ?? 0));
    let step = null;
    for (const { name, tone, data, points, quiet } of this.series) {
      // A run that has ended has no value here: its last one would be read as a value of this step.
      if (!data.steps.length || quiet || Math.floor(at) > (points ? end : data.steps.at(-1))) continue;
      const i = nearest(data.steps, at);
      step ??= data.steps[i];
      const label = data.steps[i] === step ? name : `${name}, step ${whole(data.steps[i])}`;
      rows.push(el("div", { class: tone }, el("span", {}, el("i"), label), el("b", { text: this.spec.format(data.raw[i]) })));
      if (data.smooth[i] !== data.raw[i]) rows.push(el("div", { class: "muted" }, el("span", { text: "smoothed" }), el("span", { text: this.spec.format(data.smooth[i]) })));
      if (data.high[i] - data.low[i] > Math.abs(data.high[i]) * 1e-4 && !this.spec.stack) rows.push(el("div", { class: "muted" }, el("span", { text: i ? `steps ${whole(data.steps[i - 1] + 1)} – ${whole(data.steps[i])}` : `up to step ${whole(data.steps[i])}` }), el("span", { text: `${this.spec.format(data.low[i])} – ${this.spec.format(data.high[i])}` })));
      if (!this.spec.stack) dots.push(svg("circle", { class: "mark " + tone, cx: this.x(data.steps[i]), cy: this.y(data.raw[i]), r: 3 }));
    }
    if (step === null) { this.overlay.replaceChildren(); this.tip.hidden = true; return; }
    this.overlay.replaceChildren(svg("line", { class: "cross", x1: this.x(step), x2: this.x(step), y1: 4, y2: this.plot.clientHeight - 22 }), ...dots);
    this.tip.replaceChildren(el("div", { class: "muted", text: "step " + whole(step) }), ...rows);
    this.tip.hidden = !active;
    if (!active) return;
    const left = this.x(step) + 12, flip = left + this.tip.offsetWidth > this.plot.clientWidth;
    this.tip.style.left = Math.max(0, flip ? this.x(step) - 12 - this.tip.offsetWidth : left) + "px";
    this.tip.style.top = "10px";
  }
}
