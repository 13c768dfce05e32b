"use strict";
// Shows a run, or a list of runs, from the document in the page or from updates that a server sends.
// All data of a run is inserted as text, never as HTML.

const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7", "#06b6d4", "#ec4899", "#84cc16"];
const view = { axis: "x", log: false, hidden: new Set(), open: new Set() };
let current = null;

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const isNumber = (value) => typeof value === "number";

function number(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 });

// A short label for an axis tick.
function tickLabel(value) {
  const size = Math.abs(value);
  return size >= 1e4 && size < 1e15 ? compact.format(value) : number(value);
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(value < 10 ? 1 : 0) : value} ${units[unit]}`;
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const moment = (time) => (time ? new Date(time * 1000).toLocaleString("sv-SE") : "–");

function colour(rank, ranks) {
  const place = ranks.indexOf(rank);
  return ranks.length <= COLOURS.length ? COLOURS[place] : `hsl(${Math.round((360 * place) / ranks.length)} 65% 50%)`;
}

// About `count` round numbers within a range.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.8) * power;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

// Powers of ten within a range of exponents; in a narrow range also 2 and 5 times these powers, or any round numbers.
function logTicks(low, high) {
  const stride = Math.max(1, Math.ceil((high - low) / 6));
  const factors = high - low < 2.5 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(low); power <= high; power += stride) {
    found.push(...factors.map((factor) => Math.log10(factor) + power).filter((tick) => tick >= low && tick <= high));
  }
  return found.length >= 2 ? found : ticks(10 ** low, 10 ** high, 4).filter((tick) => tick > 0).map(Math.log10);
}

function nearest(values, target) {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < target) low = middle + 1; else high = middle;
  }
  return low > 0 && target - values[low - 1] < values[low] - target ? low - 1 : low;
}

// One chart: for each series, a line through the means and a band from the minimum to the maximum.
class Chart {
  constructor(title, series, options) {
    Object.assign(this, { title, series, options });
    this.box = element("div");
    this.note = element("p", { class: "note" });
    this.card = element("div", { class: "card" }, element("h3", {}, title), this.box, this.note);
    this.card.addEventListener("pointermove", (event) => this.point(event));
    this.card.addEventListener("pointerleave", () => this.leave());
  }

  visible() { return this.series.filter((one) => !view.hidden.has(one.rank) && one.x.length); }

  draw() {
    const width = Math.max(220, this.card.clientWidth - 26 || 360);
    const height = 190;
    const pad = { left: 52, right: 10, top: 10, bottom: 24 };
    const log = view.log && this.options.metric;
    const axis = this.options.metric ? view.axis : "t";
    const up = (value) => (log ? Math.log10(value) : value);
    const series = this.visible().map((one) => ({ ...one, at: axis === "x" ? one.x : one.t.map((time) => time - current.began) }));
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    let dropped = 0;
    for (const one of series) {
      left = Math.min(left, one.at[0]); right = Math.max(right, one.at[one.at.length - 1]);
      for (let i = 0; i < one.mean.length; i += 1) {
        const [minimum, maximum] = [one.low ? one.low[i] : one.mean[i], one.high ? one.high[i] : one.mean[i]];
        if (log && minimum <= 0) { dropped += 1; if (maximum <= 0) continue; }
        low = Math.min(low, up(log && minimum <= 0 ? maximum : minimum)); high = Math.max(high, up(maximum));
      }
    }
    this.box.replaceChildren();
    if (!(low <= high)) { this.note.textContent = series.length ? "no positive value to show on the log scale" : "no rank selected"; this.scale = null; return; }
    if (this.options.zero) low = Math.min(0, low);
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const more = Math.abs(high) * 0.05 || 1; low -= more; high += more; }
    if (right - left <= 0) { left -= 1; right += 1; }
    const x = (value) => pad.left + ((value - left) / (right - left)) * (width - pad.left - pad.right);
    const y = (value) => height - pad.bottom - ((up(value) - low) / (high - low)) * (height - pad.top - pad.bottom);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${this.title}: from ${number(log ? 10 ** low : low)} to ${number(log ? 10 ** high : high)}` });
    for (const tick of log ? logTicks(low, high) : ticks(low, high, 4)) {
      const value = log ? Number((10 ** tick).toPrecision(9)) : tick;
      svg.append(shape("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: y(value), y2: y(value) }));
      const label = this.options.unit ? this.options.unit(value) : tickLabel(value);
      svg.append(shape("text", { x: pad.left - 6, y: y(value) + 4, "text-anchor": "end" }, label));
    }
    for (const tick of ticks(left, right, Math.floor(width / 90))) {
      if (axis === "x" && !Number.isInteger(tick)) continue;
      svg.append(shape("text", { x: x(tick), y: height - 7, "text-anchor": "middle" }, axis === "x" ? tickLabel(tick) : duration(tick)));
    }
    svg.append(shape("line", { class: "axis", x1: pad.left, x2: width - pad.right, y1: height - pad.bottom, y2: height - pad.bottom }));
    const floor = (value) => (log && value <= 0 ? height - pad.bottom : y(value));
    for (const one of series) {
      if (one.low) {
        const over = one.at.map((at, i) => `${x(at).toFixed(1)},${floor(one.high[i]).toFixed(1)}`);
        const under = one.at.map((at, i) => `${x(at).toFixed(1)},${floor(one.low[i]).toFixed(1)}`).reverse();
        const band = shape("path", { d: `M${over.join("L")}L${under.join("L")}Z`, fill: one.colour, stroke: one.colour, "stroke-width": 0.8, "stroke-opacity": 0.35, "fill-opacity": 0.22 });
        svg.append(band);
      }
      const middle = one.at.map((at, i) => [at, one.mean[i]]).filter((point) => !log || point[1] > 0);
      if (middle.length === 1) svg.append(shape("circle", { cx: x(middle[0][0]), cy: y(middle[0][1]), r: 3, fill: one.colour }));
      else if (middle.length) svg.append(shape("path", { d: `M${middle.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join("L")}`, fill: "none", stroke: one.colour, "stroke-width": 1.5, "stroke-linejoin": "round" }));
      if (axis === "x") for (const at of one.broken_at || []) {
        svg.append(shape("path", { d: `M${x(Math.min(right, Math.max(left, at)))},${height - pad.bottom}l-4,8h8z`, fill: "var(--bad)" }));
      }
    }
    this.cross = shape("line", { class: "cross", y1: pad.top, y2: height - pad.bottom, visibility: "hidden" });
    svg.append(this.cross);
    this.box.append(svg);
    this.scale = { left, right, width, pad, x, series, axis };
    const widest = Math.max(...series.map((one) => one.width || 1));
    const broken = series.reduce((sum, one) => sum + (one.broken || 0), 0);
    const first = Math.min(...series.flatMap((one) => one.broken_at || []));
    this.note.textContent = [
      widest > 1 ? `line: mean of ${number(widest)} reports; band: minimum and maximum` : "",
      broken ? `${number(broken)} non-finite value${broken === 1 ? "" : "s"}, first in report ${number(first)}` : "",
      dropped ? `${number(dropped)} not positive` : "",
    ].filter(Boolean).join("; ");
  }

  point(event) {
    if (!this.scale) return;
    const { left, right, width, pad, x, series, axis } = this.scale;
    const frame = this.box.getBoundingClientRect();
    const at = left + (((event.clientX - frame.left) * (width / frame.width) - pad.left) / (width - pad.left - pad.right)) * (right - left);
    if (at < left || at > right) { this.leave(); return; }
    const rows = series.slice(0, 10).map((one) => {
      const i = nearest(one.at, at);
      const value = this.options.unit ? this.options.unit(one.mean[i]) : number(one.mean[i]);
      const range = one.low && one.low[i] !== one.high[i] ? ` (${number(one.low[i])} … ${number(one.high[i])})` : "";
      const dot = element("span", { class: "dot" });
      dot.style.background = one.colour;
      return { near: one.at[i], row: element("div", {}, dot, `rank ${one.rank}: ${value}${range}`) };
    });
    if (!rows.length) return;
    if (!this.tip) { this.tip = element("div", { class: "tip" }); this.card.append(this.tip); }
    const where = axis === "x" ? `report ${number(rows[0].near)}` : `after ${duration(rows[0].near)}`;
    const more = series.length > 10 ? element("div", {}, `and ${series.length - 10} more`) : null;
    this.tip.replaceChildren(...[element("div", { class: "soft" }, where), ...rows.map((one) => one.row), more].filter(Boolean));
    const card = this.card.getBoundingClientRect();
    const place = event.clientX - card.left;
    this.tip.style.top = `${this.box.offsetTop + 4}px`;
    this.tip.style.left = place < card.width / 2 ? `${place + 14}px` : "";
    this.tip.style.right = place < card.width / 2 ? "" : `${card.width - place + 14}px`;
    this.cross.setAttribute("x1", x(rows[0].near));
    this.cross.setAttribute("x2", x(rows[0].near));
    this.cross.setAttribute("visibility", "visible");
  }

  leave() {
    if (this.tip) { this.tip.remove(); this.tip = null; }
    if (this.cross) this.cross.setAttribute("visibility", "hidden");
  }
}

let charts = [];
const redraw = () => charts.forEach((chart) => chart.draw());

function table(columns, rows) {
  const head = columns.map(([name, kind]) => element("th", { class: kind, scope: "col" }, name));
  const body = rows.map((row) => element("tr", {}, row.map((cell, i) => element("td", { class: columns[i][1] }, cell))));
  return element("div", { class: "wide" }, element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

function pairs(entries) {
  const rows = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return element("table", { class: "pairs" }, element("tbody", {}, rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)))));
}

function section(title, ...content) {
  return element("section", {}, element("h2", {}, title), ...content);
}

function fold(key, title, ...content) {
  const made = element("details", {}, element("summary", {}, title), ...content);
  made.open = view.open.has(key);
  made.addEventListener("toggle", () => (made.open ? view.open.add(key) : view.open.delete(key)));
  return made;
}

const pill = (status) => element("span", { class: `pill ${status}` }, status);
const fact = (name, value) => element("div", { class: "fact" }, element("b", {}, value), element("span", {}, name));

// The same numbers as in the train function: each driver of a run counts its attempts from 0.
function attemptName(run, attempt) {
  return run.starts > 1 ? `#${attempt.start} attempt ${attempt.number}` : `attempt ${attempt.number}`;
}

function outcome(run, attempt, isLast) {
  if (attempt.failure) return "failed";
  if (isLast && run.status === "running") return "running";
  return isLast ? run.status : "ended";
}

function drawAttempts(run) {
  const rows = run.attempts;
  if (!rows.length) return element("p", { class: "note" }, "No attempt was recorded.");
  const until = Math.max(run.ended || 0, run.last_time || 0, run.status === "running" ? run.generated : 0, ...rows.map((row) => row.ended || 0));
  const box = element("div", { class: "card wide" });
  const draw = () => {
    const width = Math.max(300, box.clientWidth - 26 || 600);
    const lane = rows.length > 20 ? 12 : 24;
    const left = 84;
    const height = rows.length * lane + (run.notes.length ? 62 : 44);
    const span = Math.max(until - run.began, 1e-3);
    const x = (time) => left + (Math.max(0, time - run.began) / span) * (width - left - 14);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${rows.length} attempts over ${duration(span)}` });
    rows.forEach((row, i) => {
      const isLast = i === rows.length - 1;
      const end = row.ended || until;
      const how = outcome(run, row, isLast);
      const tint = { failed: "var(--bad)", running: "var(--live)", finished: "var(--good)" }[how] || "var(--warn)";
      const bar = shape("rect", { x: x(row.began), y: i * lane + 4, width: Math.max(3, x(end) - x(row.began)), height: lane - 7, rx: 3, fill: tint, "fill-opacity": 0.75 });
      bar.append(shape("title", {}, `${attemptName(run, row)}, ${how}: ${duration(end - row.began)}, ${row.workers.length} workers${row.failure ? `; ${row.failure.summary}` : ""}`));
      svg.append(bar);
      if (lane > 12 || i % 5 === 0) svg.append(shape("text", { x: left - 8, y: i * lane + lane / 2 + 4, "text-anchor": "end" }, attemptName(run, row)));
      for (const failure of [...row.survived, ...(row.failure ? [row.failure] : [])]) {
        const at = failure.survived ? x(failure.time) : x(end);
        const cross = shape("path", { d: `M${at - 4},${i * lane + 4}l8,${lane - 7}m0,${-(lane - 7)}l-8,${lane - 7}`, stroke: "var(--bad)", "stroke-width": 2 });
        cross.append(shape("title", {}, failure.summary));
        svg.append(cross);
      }
    });
    const line = rows.length * lane + 12;
    svg.append(shape("text", { x: left - 8, y: line + 4, "text-anchor": "end" }, "checkpoints"));
    for (const one of [...run.dropped_checkpoints, ...run.checkpoints]) {
      const kept = "metrics" in one;
      const dot = shape("path", { d: `M${x(one.time)},${line - 5}l5,5l-5,5l-5,-5z`, fill: kept ? "var(--live)" : "none", stroke: kept ? "var(--live)" : "var(--soft)" });
      dot.append(shape("title", {}, `${one.name}${kept ? "" : ", no longer kept"}: ${moment(one.time)}`));
      svg.append(dot);
    }
    const noteLine = line + (run.notes.length ? 18 : 0);
    if (run.notes.length) svg.append(shape("text", { x: left - 8, y: noteLine + 4, "text-anchor": "end" }, "notes"));
    for (const note of run.notes) {
      const at = Math.min(x(note.time), width - 14); // it may have been added after the end
      const mark = shape("path", { d: `M${at},${noteLine - 5}l5,9h-10z`, fill: "var(--warn)" });
      mark.append(shape("title", {}, `${note.source}: ${note.text}`));
      svg.append(mark);
    }
    svg.append(shape("line", { class: "axis", x1: left, x2: width - 14, y1: noteLine + 10, y2: noteLine + 10 }));
    for (const tick of ticks(0, span, Math.floor(width / 110))) svg.append(shape("text", { x: x(run.began + tick), y: height - 6, "text-anchor": "middle" }, duration(tick)));
    box.replaceChildren(svg);
  };
  charts.push({ draw });
  return box;
}

function notes(run) {
  if (!run.notes.length) return null;
  const rows = run.notes.map((note) => [duration(Math.max(0, note.time - run.began)), note.source, note.text]);
  return element("div", { class: "card" }, table([["after", "number"], ["noted by", ""], ["event", "text"]], rows));
}

function failures(run) {
  const found = run.attempts.flatMap((attempt) => [...attempt.survived, attempt.failure].filter(Boolean).map((failure) => [attempt, failure]));
  const cards = found.map(([attempt, failure], number) => {
    return element("div", { class: "card error" },
      element("h3", {}, `${attemptName(run, attempt)}, after ${duration(failure.time - attempt.began)}: ${failure.kind}`),
      element("div", {}, failure.summary),
      element("div", { class: "note" }, failure.survived ? "lost ranks were replaced; the other ranks continued" : failure.retrying ? "retried" : "not retried"),
      failure.traceback ? fold(`trace ${number}`, "traceback", element("pre", {}, failure.traceback)) : null,
      failure.log ? fold(`log ${number}`, "last lines of the log", element("pre", {}, failure.log)) : null);
  });
  if (run.failure && !cards.length) cards.push(element("div", { class: "card error" }, element("pre", {}, run.failure.message)));
  if (run.error && !cards.length) cards.push(element("div", { class: "card error" }, run.error));
  return cards.length ? section("Failures", ...cards) : null;
}

function metrics(run) {
  const ranks = [...new Set(run.curves.map((curve) => curve.rank))];
  const names = [...new Set(run.curves.map((curve) => curve.metric))].filter((name) => name !== "_time_this_iter_s");
  const of = (name) => run.curves.filter((curve) => curve.metric === name).map((curve) => ({ ...curve, colour: colour(curve.rank, ranks) }));
  const made = names.map((name) => new Chart(name, of(name), { metric: true }));
  const speed = of("_time_this_iter_s").map((curve) => ({ ...curve, mean: curve.mean.map((s) => 1 / Math.max(s, 1e-6)), low: undefined, high: undefined }));
  const usage = run.usage.map((one) => ({ rank: one.rank, t: one.time, x: one.time, colour: colour(one.rank, ranks.length ? ranks : run.usage.map((each) => each.rank)) }));
  const more = speed.length ? [new Chart("throughput: reports per second", speed, { zero: true })] : [];
  if (usage.length) {
    more.push(new Chart("CPUs in use, including child processes", usage.map((one, i) => ({ ...one, mean: run.usage[i].cpus })), { zero: true }));
    more.push(new Chart("resident memory", usage.map((one, i) => ({ ...one, mean: run.usage[i].bytes })), { zero: true, unit: bytes }));
  }
  charts.push(...made, ...more);
  const toggle = (label, isOn, change) => element("button", { "aria-pressed": String(isOn), onclick: () => { change(); show(current); } }, label);
  const bar = element("div", { class: "bar" },
    toggle("by report", view.axis === "x", () => { view.axis = "x"; }),
    toggle("by time", view.axis === "t", () => { view.axis = "t"; }),
    toggle("log scale", view.log, () => { view.log = !view.log; }),
    ranks.length > 1 ? ranks.map((rank) => {
      const dot = element("span", { class: "dot" });
      dot.style.background = colour(rank, ranks);
      const change = () => (view.hidden.has(rank) ? view.hidden.delete(rank) : view.hidden.add(rank));
      return element("button", { class: "rank", "aria-pressed": String(!view.hidden.has(rank)), onclick: () => { change(); show(current); } }, dot, `rank ${rank}`);
    }) : null);
  return [
    section("Metrics", made.length ? bar : element("p", { class: "note" }, "No numeric metric was reported."), element("div", { class: "charts" }, made.map((chart) => chart.card))),
    more.length ? section("Throughput and resources", element("div", { class: "charts" }, more.map((chart) => chart.card))) : null,
  ];
}

function showRun(run) {
  const last = run.attempts[run.attempts.length - 1];
  const total = run.checkpoints.reduce((sum, one) => sum + (one.bytes || 0), 0);
  const reports = Object.values(run.reports).reduce((sum, count) => sum + count, 0);
  const latest = Object.entries(run.metrics || {});
  const keys = [...new Set(run.checkpoints.flatMap((one) => Object.keys(one.metrics)))].filter((key) => !key.startsWith("_")).slice(0, 5);
  return [
    element("header", {},
      element("div", { class: "head" }, element("h1", {}, run.name), pill(run.status), run.home ? element("a", { href: run.home }, "all runs") : null),
      element("p", { class: "place soft" }, run.location),
      run.read < 1 ? element("p", { class: "note" }, `reading reports: ${Math.floor(run.read * 100)} %`) : null,
      run.holder ? element("p", { class: "note" }, `in use by ${run.holder}`) : null,
      element("div", { class: "facts" },
        fact("duration", duration(run.duration_s)),
        fact("workers", last ? number(last.workers.length) : "–"),
        fact("attempts", number(run.attempts.length)),
        fact("reports of all ranks", number(reports)),
        fact(`checkpoints kept (${bytes(total)})`, number(run.checkpoints.length)),
        ...latest.filter(([, value]) => isNumber(value)).slice(0, 3).map(([name, value]) => fact(`latest ${name}`, number(value))))),
    section("Attempts", drawAttempts(run), notes(run)),
    failures(run),
    ...metrics(run),
    section("Checkpoints", run.checkpoints.length
      ? element("div", { class: "card" }, table(
        [["name", ""], ["report", "number"], ["committed", ""], ["size", "number"], ["files", "number"], ...keys.map((key) => [key, "number"])],
        run.checkpoints.slice().reverse().map((one) => [element("code", {}, one.name), number(one.iteration), moment(one.time), bytes(one.bytes), number(one.files), ...keys.map((key) => number(one.metrics[key]))])))
      : element("p", { class: "note" }, "No checkpoint was committed.")),
    last ? section("Workers", element("div", { class: "card" },
      last.workers.length ? table([["rank", "number"], ["host", ""], ["address", ""], ["node rank", "number"], ["local rank", "number"], ["process", "number"], ["GPUs", ""]],
        last.workers.map((one) => [number(one.rank), one.hostname, one.ip, number(one.node_rank), number(one.local_rank), String(one.pid), one.accelerator_ids.join(", ") || "–"])) : "in the driver's process")) : null,
    section("Configuration", element("div", { class: "card" }, pairs([
      ["train function", run.train_function], ["trainer", run.trainer], ["config", run.train_loop_config], ["scaling", run.scaling_config], ["run", run.run_config],
      ["started", moment(run.began)], ["ended", run.ended ? moment(run.ended) : null], ["drivers", number(run.starts)], ["id", run.id]]))),
    section("Environment (driver)", element("div", { class: "card" }, pairs([
      ...Object.entries(run.environment).filter(([name]) => name !== "packages").map(([name, value]) => [name.replace("_bytes", ""), name === "memory_bytes" ? bytes(value) : String(value)]),
      ...Object.entries(run.environment.packages || {})]))),
    element("p", { class: "note" }, `as of ${moment(run.generated)}, drivetrain ${run.version}`),
  ];
}

function showRuns(runs) {
  const names = [...new Set(runs.runs.flatMap((run) => Object.keys(run.metrics).filter((name) => isNumber(run.metrics[name]))))].slice(0, 4);
  return [
    element("header", {}, element("h1", {}, "Runs"), element("p", { class: "place soft" }, runs.location)),
    element("div", { class: "card" }, runs.runs.length ? table(
      [["run", ""], ["status", ""], ["started", ""], ["duration", "number"], ["workers", "number"], ["reports", "number"], ["checkpoints", "number"], ...names.map((name) => [name, "number"]), ["", "text"]],
      runs.runs.map((run) => [element("a", { href: run.link }, run.name), pill(run.status), moment(run.began), duration(run.duration_s), number(run.workers), number(run.reports), number(run.checkpoints), ...names.map((name) => number(run.metrics[name])), run.error]))
      : "There are no runs here yet."),
    element("p", { class: "note" }, `as of ${moment(runs.generated)}, drivetrain ${runs.version}`),
  ];
}

function show(data) {
  current = data;
  charts = [];
  document.title = data.kind === "run" ? `${data.name}: ${data.status}` : "drivetrain: runs";
  const content = data.kind === "run" ? showRun(data) : showRuns(data);
  document.querySelector("main").replaceChildren(...content.filter(Boolean));
  redraw();
  document.documentElement.dataset.shown = String(Number(document.documentElement.dataset.shown || 0) + 1);
}

show(JSON.parse(document.getElementById("data").textContent));
let settle = 0;
window.addEventListener("resize", () => { clearTimeout(settle); settle = setTimeout(redraw, 80); });
if (current.events) new EventSource(current.events).addEventListener("message", (event) => show(JSON.parse(event.data)));
