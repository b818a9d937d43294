"use strict";
// Draws the charts from the data in the page. The HTML parser makes the SVG, so every text goes through esc().
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const esc = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const show = value => {
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(3) : value.toPrecision(3);
};
const time = ms => ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 2 : 1)} ms`;

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - box.height - 4, event.clientY - box.height - 10))}px`;
}
const hideTip = () => { tip.hidden = true; };

// About `count` round numbers that span [low, high].
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find(factor => factor * power >= raw * 0.999) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9) + 0; i * step <= high + step * 1e-9; i++) found.push(i * step + 0);
  return found;
}
const tickText = (value, all) => {
  const step = all.length > 1 ? all[1] - all[0] : 1;
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9) + (/^(2\.5|25)/.test(step.toPrecision(2)) && step < 10 ? 1 : 0)));
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};

// A chart of lines over steps: series [{name, kind, points: [[step, value], ...]}]; zero: the scale starts at 0.
function lineChart(id, series, zero) {
  const host = document.getElementById(id);
  const shown = series.filter(one => one.points.length);
  if (!shown.length) { host.innerHTML = '<p class="none">No metrics were reported.</p>'; return; }
  const points = shown.flatMap(one => one.points);
  const x0 = Math.min(...points.map(p => p[0])), x1 = Math.max(...points.map(p => p[0]));
  let y0 = zero ? 0 : Math.min(...points.map(p => p[1])), y1 = Math.max(...points.map(p => p[1]));
  const slack = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
  y1 += slack; if (!zero) y0 -= slack;
  const width = Math.max(240, host.clientWidth), height = width < 420 ? 220 : 260;
  const yTicks = ticks(y0, y1, 5), labels = yTicks.map(v => tickText(v, yTicks));
  const left = 14 + 7 * Math.max(...labels.map(label => label.length)), right = 8, top = 8, bottom = 40;
  const x = v => left + (v - x0) / (x1 - x0 || 1) * (width - left - right);
  const y = v => height - bottom - (v - y0) / (y1 - y0) * (height - top - bottom);
  const grid = yTicks.map((v, i) => `<line class="grid" x1="${left}" x2="${width - right}" y1="${y(v)}" y2="${y(v)}"/><text x="${left - 8}" y="${y(v) + 4}" text-anchor="end">${labels[i]}</text>`);
  const xTicks = ticks(x0, x1, Math.max(2, Math.floor(width / 90))).filter(v => Number.isInteger(v));
  const foot = xTicks.map(v => `<text x="${x(v)}" y="${height - bottom + 18}" text-anchor="middle">${v.toLocaleString("en-US")}</text>`);
  const lines = shown.map(one => {
    const path = one.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    const few = one.points.length === 1 ? `<circle class="dot d-${one.kind}" r="4" cx="${x(one.points[0][0])}" cy="${y(one.points[0][1])}"/>` : "";
    return `<path class="line s-${one.kind}" d="${path}"/>${few}`;
  });
  host.innerHTML = `<svg viewBox="0 0 ${width} ${height}" height="${height}">${grid.join("")}<line class="axis" x1="${left}" x2="${width - right}" y1="${height - bottom}" y2="${height - bottom}"/>${foot.join("")}<text x="${(left + width - right) / 2}" y="${height - 4}" text-anchor="middle">step</text>${lines.join("")}<g class="hover"></g></svg>`;
  const svg = host.firstChild, hover = svg.querySelector(".hover");
  svg.onpointermove = event => {
    const at = x0 + (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right) * (x1 - x0);
    const near = shown.map(one => one.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    const step = near[0][0];
    hover.innerHTML = `<line class="rule" x1="${x(step)}" x2="${x(step)}" y1="${top}" y2="${height - bottom}"/>` +
      near.map((p, i) => `<circle class="dot d-${shown[i].kind}" r="4.5" cx="${x(p[0])}" cy="${y(p[1])}"/>`).join("");
    showTip(event, [`step ${step}`, ...near.map((p, i) => `${shown[i].name} ${show(p[1])}` + (p[0] === step || shown[i].kind === "foreseen" ? "" : ` (step ${p[0]})`))].join("\n"));
  };
  svg.onpointerleave = () => { hover.innerHTML = ""; hideTip(); };
}

const KINDS = ["forward", "backward", "receive", "send", "update", "reduce"];
const WORDS = { forward: "forward", backward: "backward", receive: "waiting to receive", send: "waiting to send", update: "optimizer", reduce: "gradients of parameters", idle: "idle" };
const MESSAGES = { forward: "activations", backward: "gradients of activations", reduce: "gradients of parameters" };
const kindOf = kind => KINDS.includes(kind) ? kind : "other";

// Rows for the messages of a link, so that none covers another; returns the row of each and the number of rows.
function rowsOf(spans) {
  const ends = [];
  const rows = spans.map(([, , start, end, queued]) => {
    let row = ends.findIndex(at => at <= start - queued);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = end;
    return row;
  });
  return [rows, Math.max(1, ends.length)];
}

// The lanes of one step: ranks under their cluster's name, then one lane for each link.
function timeline(one) {
  const host = document.getElementById("timeline");
  const used = new Set([...one.lanes, ...one.links].flatMap(lane => lane.spans.map(span => span[0])));
  document.getElementById("kinds").innerHTML = [...KINDS.filter(kind => used.has(kind)), ...[...used].filter(kind => !KINDS.includes(kind)), "idle"]
    .map(kind => `<span><i class="mark k-${kind === "idle" ? "idle" : kindOf(kind)}"></i>${esc(WORDS[kind] || kind)}</span>`).join("");
  const width = Math.max(560, host.clientWidth), names = [...one.lanes, ...one.links].map(lane => lane.label.length);
  const left = Math.min(240, 18 + 6.9 * Math.max(...names)), right = 10;
  const x = ms => left + ms / (one.length_ms || 1) * (width - left - right);
  const parts = [];
  let y = 4, cluster = null;
  const link = entry => {
    const [rows, count] = rowsOf(entry.spans), high = 9, tall = Math.max(18, count * (high + 2) + 2);
    parts.push(`<text x="8" y="${y + tall / 2 + 4}">${esc(entry.label)}</text><rect class="lane" x="${left}" y="${y}" width="${width - left - right}" height="${tall}" rx="2"/>`);
    entry.spans.forEach(([kind, batch, start, end, queued], i) => {
      const top = y + 2 + rows[i] * (high + 2);
      const text = `${MESSAGES[kind] || kind}${batch < 0 ? "" : `, micro-batch ${batch}`}\n${time(end - start)} on the way from ${time(start)}` + (queued >= 0.01 ? `\nafter ${time(queued)} in the sender's queue` : "");
      if (queued >= 0.01) parts.push(`<line class="queued" x1="${x(start - queued).toFixed(2)}" x2="${x(start).toFixed(2)}" y1="${top + high / 2}" y2="${top + high / 2}"/>`);
      parts.push(`<rect class="k-${kindOf(kind)} wire" x="${x(start).toFixed(2)}" y="${top}" width="${Math.max(0.75, x(end) - x(start) - 0.5).toFixed(2)}" height="${high}" rx="1.5" data-tip="${esc(text)}"/>`);
    });
    y += tall + 5;
  };
  const lane = (entry, tall) => {
    parts.push(`<text x="8" y="${y + tall / 2 + 4}">${esc(entry.label)}</text><rect class="lane" x="${left}" y="${y}" width="${width - left - right}" height="${tall}" rx="2"/>`);
    // Sends may overlap with computation: they are thin, and drawn last.
    const order = [...entry.spans.filter(span => span[0] !== "send"), ...entry.spans.filter(span => span[0] === "send")];
    for (const [kind, batch, start, end] of order) {
      const inset = kind === "send" ? tall - 7 : 0, high = kind === "send" ? 7 : tall;
      const what = WORDS[kind] || kind;
      const text = `${what}${batch < 0 ? "" : `, micro-batch ${batch}`}\n${time(end - start)} from ${time(start)}`;
      parts.push(`<rect class="k-${kindOf(kind)}" x="${x(start).toFixed(2)}" y="${y + inset}" width="${Math.max(0.75, x(end) - x(start) - 0.5).toFixed(2)}" height="${high}" rx="1.5" data-tip="${esc(text)}"/>`);
    }
    y += tall + 5;
  };
  for (const entry of one.lanes) {
    if (entry.cluster !== cluster) { y += cluster === null ? 0 : 8; parts.push(`<text class="group" x="0" y="${y + 12}">${esc(entry.cluster)}</text>`); y += 19; cluster = entry.cluster; }
    lane(entry, 22);
  }
  if (one.has_links) { y += 8; parts.push(`<text class="group" x="0" y="${y + 12}">between clusters</text>`); y += 19; }
  if (one.has_links && !one.links.length) { parts.push(`<text x="8" y="${y + 12}">not recorded by this run</text>`); y += 19; }
  for (const entry of one.links) link(entry);
  const all = ticks(0, one.length_ms, Math.max(3, Math.floor((width - left) / 110)));
  const axis = all.map(v => `<line class="grid" x1="${x(v)}" x2="${x(v)}" y1="0" y2="${y + 4}"/><text x="${x(v)}" y="${y + 18}" text-anchor="${v ? "middle" : "start"}">${tickText(v, all)}</text>`);
  host.innerHTML = `<svg viewBox="0 0 ${width} ${y + 40}" height="${y + 40}">${axis.join("")}<text x="${(left + width - right) / 2}" y="${y + 36}" text-anchor="middle">milliseconds</text>${parts.join("")}</svg>`;
  const svg = host.firstChild;
  svg.onpointermove = event => { const text = event.target.dataset.tip; if (text) showTip(event, text); else hideTip(); };
  svg.onpointerleave = hideTip;
}

const steps = data.throughput.map(point => point[0]);
const foreseen = data.predicted_throughput && steps.length
  ? [[steps[0], data.predicted_throughput], [steps[steps.length - 1], data.predicted_throughput]] : [];
if (!data.validation.length) document.querySelector("[data-needs=validation]").remove();
if (!foreseen.length) document.querySelector("[data-needs=predicted]").remove();
const choice = document.getElementById("step");
choice.innerHTML = data.timelines.map((one, i) => `<option value="${i}">${one.step}</option>`).join("");
if (data.timelines.length) choice.value = data.timelines.length - 1;
else {
  document.getElementById("pick").remove();
  document.getElementById("timeline").innerHTML = '<p class="none">No step was traced.</p>';
}

function draw() {
  lineChart("loss", [{ name: "training", kind: "train", points: data.loss }, { name: "validation", kind: "held", points: data.validation }], false);
  lineChart("throughput", [{ name: "measured", kind: "rate", points: data.throughput }, { name: "predicted", kind: "foreseen", points: foreseen }], true);
  if (data.timelines.length) timeline(data.timelines[Number(choice.value)]);
}
choice.onchange = draw;
let drawnAt = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawnAt) { drawnAt = innerWidth; draw(); } });
draw();
