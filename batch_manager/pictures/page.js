"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const MARGIN = { left: 74, right: 16 };
const KINDS = ["queued", "context", "generation", "stalled", "paused"];
const [KIND, BEGIN, END, FIRST, LAST, DETAIL] = [0, 1, 2, 3, 4, 5];

const charts = document.getElementById("charts");
const tracks = document.getElementById("tracks");
const tooltip = document.getElementById("tooltip");
const whole = { begin: 0, end: Math.max(data.end, 1e-6) };
const view = { ...whole };

// Helpers

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function seconds(value) {
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return value >= 0.001 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

function prepare(canvas, height, width = canvas.parentElement.clientWidth) {
  const scale = window.devicePixelRatio || 1;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return { pen, width, height };
}

function niceStep(span, count) {
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
}

/** Time to pixels and back, for the plotting area between the margins. */
function timeScale(range, width) {
  const inner = width - MARGIN.left - MARGIN.right;
  const span = range.end - range.begin;
  return {
    x: (time) => MARGIN.left + ((time - range.begin) / span) * inner,
    time: (x) => range.begin + ((x - MARGIN.left) / inner) * span,
    right: width - MARGIN.right,
  };
}

function clipToPlot(pen, width, top, height) {
  pen.save();
  pen.beginPath();
  pen.rect(MARGIN.left, top, width - MARGIN.left - MARGIN.right, height);
  pen.clip();
}

function drawTimeAxis(pen, range, width, y) {
  const { x } = timeScale(range, width);
  const step = niceStep(range.end - range.begin, 8);
  pen.fillStyle = color("faint");
  pen.textAlign = "center";
  for (let time = Math.ceil(range.begin / step) * step; time <= range.end; time += step) {
    pen.fillText(`${+time.toPrecision(6)} s`, x(time), y);
  }
}

/** A chart of stacked or single series over time intervals [begin, end). */
function drawChart({ pen, width }, range, top, height, chart) {
  const { x } = timeScale(range, width);
  const peak = Math.max(1, chart.limit || 0, ...chart.intervals.map((item) => chart.values(item).reduce((a, b) => a + b, 0)));
  const y = (value) => top + height - (value / peak) * (height - 16);
  pen.fillStyle = color("faint");
  pen.textAlign = "right";
  pen.fillText(chart.format ? chart.format(peak) : `${peak}`, MARGIN.left - 8, y(peak));
  pen.fillText("0", MARGIN.left - 8, y(0) - 3);
  pen.textAlign = "left";
  pen.fillText(chart.title, MARGIN.left + 2, top + 6);
  pen.fillStyle = color("line");
  pen.fillRect(MARGIN.left, y(0), width - MARGIN.left - MARGIN.right, 1);
  clipToPlot(pen, width, top, height);
  for (const item of chart.intervals) {
    const [begin, end] = chart.interval(item);
    if (end < range.begin || begin > range.end) continue;
    const left = x(begin);
    const gap = chart.bars && x(end) - left > 4 ? 1 : 0;
    const barWidth = Math.max(1, x(end) - left - gap) + (chart.bars ? 0 : 0.5);
    let base = 0;
    chart.values(item).forEach((value, index) => {
      pen.fillStyle = color(chart.colors[index]);
      pen.fillRect(left, y(base + value), barWidth, y(base) - y(base + value));
      base += value;
    });
  }
  if (chart.limit) {
    pen.strokeStyle = color("faint");
    pen.setLineDash([4, 4]);
    pen.beginPath();
    pen.moveTo(MARGIN.left, y(chart.limit));
    pen.lineTo(width, y(chart.limit));
    pen.stroke();
  }
  pen.restore();
}

// Timeline

const CHART_HEIGHT = 92;
const iterationCharts = [
  {
    title: "rows of the batch",
    values: (item) => [item.context_rows, item.generation_rows],
    colors: ["context", "generation"],
    limit: data.max_num_tokens,
    bars: true,
  },
  {
    title: "KV blocks: used, cached",
    values: (item) => [item.used, item.cached],
    colors: ["generation", "cached"],
    limit: data.num_blocks,
  },
  { title: "requests: running, waiting", values: (item) => [item.running, item.waiting], colors: ["generation", "queued"] },
].filter((chart) => chart.limit !== 0).map((chart) => ({
  ...chart,
  intervals: data.iterations,
  interval: (item) => [item.begin, item.until],
}));

const ROW_HEIGHT = data.tracks.length > 60 ? 9 : 16;

function draw() {
  // As wide as the requests below, which have a scroll bar, so that both have one time axis.
  const top = prepare(charts, iterationCharts.length * CHART_HEIGHT + 22, tracks.parentElement.clientWidth);
  iterationCharts.forEach((chart, index) => drawChart(top, view, index * CHART_HEIGHT, CHART_HEIGHT - 10, chart));
  drawTimeAxis(top.pen, view, top.width, iterationCharts.length * CHART_HEIGHT + 8);
  drawTracks();
}

function drawTracks() {
  const { pen, width, height } = prepare(tracks, Math.max(1, data.tracks.length) * ROW_HEIGHT + 6);
  const { x } = timeScale(view, width);
  pen.fillStyle = color("faint");
  pen.textAlign = "right";
  const labelEvery = Math.ceil(14 / ROW_HEIGHT);
  data.tracks.forEach((track, row) => {
    if (row % labelEvery === 0) pen.fillText(track.id, MARGIN.left - 8, row * ROW_HEIGHT + ROW_HEIGHT / 2 + 3);
  });
  const colors = Object.fromEntries(KINDS.map((kind) => [kind, color(kind)]));
  clipToPlot(pen, width, 0, height);
  data.tracks.forEach((track, row) => {
    const top = row * ROW_HEIGHT + 4;
    for (const span of track.spans) {
      if (span[END] < view.begin || span[BEGIN] > view.end) continue;
      const kind = KINDS[span[KIND]];
      const thin = kind === "queued" || kind === "paused" || kind === "stalled";
      const bar = thin ? Math.max(2, ROW_HEIGHT * 0.35) : ROW_HEIGHT - 3;
      pen.fillStyle = colors[kind];
      pen.fillRect(x(span[BEGIN]), top + (ROW_HEIGHT - 3 - bar) / 2, Math.max(0.75, x(span[END]) - x(span[BEGIN]) - 0.5), bar);
    }
  });
  pen.restore();
}

function setView(begin, end) {
  const span = Math.min(Math.max(end - begin, (whole.end - whole.begin) * 1e-5), whole.end - whole.begin);
  view.begin = Math.min(Math.max(begin, whole.begin), whole.end - span);
  view.end = view.begin + span;
  draw();
}

function zoom(factor, center) {
  setView(center - (center - view.begin) * factor, center + (view.end - center) * factor);
}

function timeAt(event, canvas) {
  const box = canvas.getBoundingClientRect();
  return timeScale(view, box.width).time(event.clientX - box.left);
}

// What is under the pointer

function iterationAt(time) {
  return data.iterations.find((item) => item.begin <= time && time < item.until);
}

function describeIteration(time) {
  const item = iterationAt(time);
  if (!item) return `${seconds(time)}: nothing runs`;
  const middle = (item.begin + item.end) / 2;
  const inIt = (kind) => data.tracks
    .filter((track) => track.spans.some((span) => KINDS[span[KIND]] === kind && span[BEGIN] <= middle && middle < span[END]))
    .map((track) => track.id);
  const list = (ids) => (ids.length ? `: ${ids.slice(0, 16).join(", ")}${ids.length > 16 ? ", ..." : ""}` : "");
  const lines = [
    `iteration ${item.iteration}, at ${seconds(item.begin)}, took ${seconds(item.end - item.begin)}`,
    `context: ${item.context_requests} requests, ${item.context_rows} rows${list(inIt("context"))}`,
    `generation: ${item.generation_requests} requests, ${item.generation_rows} rows${list(inIt("generation"))}`,
    `${item.running} running, ${item.waiting} waiting, ${item.paused} paused just now`,
  ];
  if (data.num_blocks) lines.push(`KV blocks: ${item.used} used, ${item.cached} cached, of ${data.num_blocks}`);
  return lines.join("\n");
}

function describeTrack(track, time) {
  const lines = [`request ${track.id}${track.tenant ? `, tenant ${track.tenant}` : ""}: ${track.prompt} prompt tokens`];
  const span = track.spans.find((candidate) => candidate[BEGIN] <= time && time < candidate[END]);
  if (span) {
    const iterations = span[FIRST] === span[LAST] ? `iteration ${span[FIRST]}` : `iterations ${span[FIRST]} to ${span[LAST]}`;
    lines.push(`${KINDS[span[KIND]]} for ${seconds(span[END] - span[BEGIN])}, ${iterations}`, span[DETAIL]);
  }
  if (track.end === null) lines.push("had not ended");
  else {
    const first = track.first === null ? "" : `, first token after ${seconds(track.first - track.arrival)}`;
    lines.push(
      `ended with ${track.reason} after ${seconds(track.end - track.arrival)}${first}`,
      `${track.output} tokens generated, ${track.reused} reused, ${track.recomputed} recomputed, ${track.pauses} pauses`,
    );
  }
  return lines.filter(Boolean).join("\n");
}

function showTooltip(event, text) {
  tooltip.textContent = text;
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - box.width - 8)}px`;
  tooltip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - box.height - 8)}px`;
}

function onMove(event, canvas) {
  const time = timeAt(event, canvas);
  if (canvas === charts) return showTooltip(event, describeIteration(time));
  const row = Math.floor((event.clientY - canvas.getBoundingClientRect().top - 2) / ROW_HEIGHT);
  const track = data.tracks[row];
  if (track) showTooltip(event, describeTrack(track, time));
  else tooltip.hidden = true;
}

for (const canvas of [charts, tracks]) {
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    if (canvas === tracks && !event.ctrlKey && !event.shiftKey && tracks.clientHeight > tracks.parentElement.clientHeight) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event, canvas));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, begin: view.begin, end: view.end };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return onMove(event, canvas);
    const perPixel = (drag.end - drag.begin) / (canvas.clientWidth - MARGIN.left - MARGIN.right);
    const shift = (drag.x - event.clientX) * perPixel;
    return setView(drag.begin + shift, drag.end + shift);
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { tooltip.hidden = true; });
}

charts.addEventListener("keydown", (event) => {
  const step = (view.end - view.begin) / 5;
  const middle = (view.begin + view.end) / 2;
  if (event.key === "ArrowLeft") setView(view.begin - step, view.end - step);
  else if (event.key === "ArrowRight") setView(view.begin + step, view.end + step);
  else if (event.key === "+") zoom(0.5, middle);
  else if (event.key === "-") zoom(2, middle);
});

for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    const factor = Number(button.dataset.zoom);
    if (factor) zoom(factor, (view.begin + view.end) / 2);
    else setView(whole.begin, whole.end);
  });
}

// Latency and the whole run

const CURVE_COLORS = ["context", "generation", "paused", "stalled"];

function fillPercentiles() {
  const table = document.getElementById("percentiles");
  const names = ["mean", "p50", "p90", "p95", "p99", "max"];
  const cell = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
  const head = table.createTHead().insertRow();
  ["", ...names].forEach((name) => head.append(cell("th", name)));
  const body = table.createTBody();
  for (const { name, values } of data.latency) {
    const row = body.insertRow();
    row.append(cell("td", name));
    names.forEach((key) => row.append(cell("td", seconds(values[key]))));
  }
}

function drawCurves() {
  const plotted = data.latency.filter((item) => item.curve.length);
  const { pen, width, height } = prepare(document.getElementById("curves"), 260);
  const times = plotted.flatMap((item) => item.curve.map(([time]) => time)).filter((time) => time > 0);
  if (!times.length) return;
  const low = Math.log10(Math.min(...times));
  const high = Math.max(low + 0.1, Math.log10(Math.max(...times)));
  const x = (time) => MARGIN.left + ((Math.log10(Math.max(time, 10 ** low)) - low) / (high - low)) * (width - MARGIN.left - MARGIN.right);
  const y = (share) => height - 26 - share * (height - 40);
  pen.fillStyle = color("faint");
  pen.strokeStyle = color("line");
  for (const share of [0, 0.5, 0.9, 1]) {
    pen.textAlign = "right";
    pen.fillText(`${share * 100} %`, MARGIN.left - 8, y(share));
    pen.strokeRect(MARGIN.left, y(share), width - MARGIN.left - MARGIN.right, 0);
  }
  pen.textAlign = "center";
  for (let power = Math.ceil(low); power <= high; power += 1) pen.fillText(seconds(10 ** power), x(10 ** power), height - 10);
  plotted.forEach((item, index) => {
    pen.strokeStyle = pen.fillStyle = color(CURVE_COLORS[index % CURVE_COLORS.length]);
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(x(item.curve[0][0]), y(0));
    item.curve.forEach(([time, share]) => pen.lineTo(x(time), y(share)));
    pen.stroke();
    pen.textAlign = "left";
    pen.fillText(item.name, MARGIN.left + 10, y(0.9) + 14 + index * 15);
  });
}

function drawSeries() {
  const { points, width: pointWidth } = data.series;
  const range = { begin: 0, end: Math.max(points.length, 1) * pointWidth };
  const common = { intervals: points.map((point, index) => ({ ...point, index })), interval: ({ index }) => [index * pointWidth, (index + 1) * pointWidth] };
  const rate = (value) => `${Math.round(value)}/s`;
  const list = [
    { title: "output tokens a second", values: (point) => [point.output_tokens / pointWidth], colors: ["generation"], format: rate },
    { title: "rows a second: context, generation", values: (point) => [point.context_rows / pointWidth, point.generation_rows / pointWidth], colors: ["context", "generation"], format: rate },
    { title: "requests, at most: running, waiting", values: (point) => [point.running, point.waiting], colors: ["generation", "queued"] },
    { title: "pauses", values: (point) => [point.pauses], colors: ["paused"] },
  ];
  if (data.num_blocks) list.push({ title: "KV blocks used, at most", values: (point) => [point.used], colors: ["generation"], limit: data.num_blocks });
  const area = prepare(document.getElementById("series-charts"), list.length * CHART_HEIGHT + 22);
  list.forEach((chart, index) => drawChart(area, range, index * CHART_HEIGHT, CHART_HEIGHT - 10, { ...common, ...chart }));
  drawTimeAxis(area.pen, range, area.width, list.length * CHART_HEIGHT + 8);
}

function drawAll() {
  drawTracks(); // first: whether there is a scroll bar decides how wide the charts are
  draw();
  if (data.latency.length) drawCurves();
  if (data.series) drawSeries();
}

document.getElementById("facts").textContent = data.facts;
document.getElementById("legend").append(...[...KINDS, "cached"].map((kind) => {
  const entry = document.createElement("li");
  const swatch = document.createElement("i");
  swatch.style.background = `var(--${kind})`;
  entry.append(swatch, kind === "cached" ? "KV blocks cached" : kind);
  return entry;
}));
document.getElementById("latency").hidden = !data.latency.length;
document.getElementById("series").hidden = !data.series;
if (data.latency.length) fillPercentiles();
window.addEventListener("resize", drawAll);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
document.documentElement.dataset.ready = "true";
