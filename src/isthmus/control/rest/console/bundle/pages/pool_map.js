// The map of the pool: sites on a circle, links between them as thick as their capacity, green where jobs flow.

import { count, counted, short } from "../lib/text.js";
import { html } from "../lib/ui.js";

const MAX_SITES = 24;
const WIDTH = 900;
const HEIGHT = 420;
const RADIUS = 34;

export function PoolMap({ sites, links }) {
  const shown = [...sites].sort((a, b) => b.total - a.total || (a.name < b.name ? -1 : 1)).slice(0, MAX_SITES);
  if (!shown.length) return html`<p class="none">No site has joined the pool.</p>`;
  const places = new Map(shown.sort((a, b) => (a.name < b.name ? -1 : 1)).map((one, at) => [one.name, place(at, shown.length)]));
  const pairs = new Map();
  for (const one of links) {
    if (!places.has(one.from) || !places.has(one.to)) continue;
    const key = [one.from, one.to].sort().join(" > ");
    const pair = pairs.get(key) ?? { ends: [one.from, one.to], gbps: 0, reserved: 0, jobs: new Set() };
    pair.gbps = Math.max(pair.gbps, one.bandwidth_gbps);
    pair.reserved = Math.max(pair.reserved, one.reserved);
    for (const job of one.jobs) pair.jobs.add(job);
    pairs.set(key, pair);
  }
  const said = `${counted(shown.length, "site")} and ${counted(pairs.size, "link")}; the tables below have the same`;
  return html`<svg class="map" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`Map of the pool: ${said}`}>
    ${[...pairs.entries()].map(([key, one]) => html`<${Link} key=${key} link=${one} places=${places}/>`)}
    ${shown.map((one) => html`<${Site} key=${one.name} site=${one} at=${places.get(one.name)}/>`)}
  </svg>
  ${sites.length > MAX_SITES && html`<p class="hint">The ${MAX_SITES} sites with most chips; the table lists all.</p>`}`;
}

function place(at, number) {
  if (number === 1) return [WIDTH / 2, HEIGHT / 2];
  const angle = (2 * Math.PI * at) / number - Math.PI;
  return [WIDTH / 2 + Math.cos(angle) * (WIDTH / 2 - 130), HEIGHT / 2 + Math.sin(angle) * (HEIGHT / 2 - 70)];
}

function Link({ link, places }) {
  const [[x1, y1], [x2, y2]] = link.ends.map((name) => places.get(name));
  const wide = Math.min(9, 1.5 + Math.log2(1 + link.gbps));
  const flows = link.reserved > 0 || link.jobs.size > 0;
  const note = flows ? `${short(link.reserved)} of ${short(link.gbps)} Gbit/s` : `${short(link.gbps)} Gbit/s`;
  return html`<g>
    <line class=${flows ? "flow" : "link"} x1=${x1} y1=${y1} x2=${x2} y2=${y2} stroke-width=${wide} opacity=${flows ? 0.9 : 0.35}/>
    <text class="note" x=${(x1 + x2) / 2} y=${(y1 + y2) / 2 - 7} text-anchor="middle">${note}</text>
  </g>`;
}

function Site({ site, at: [x, y] }) {
  const used = site.total ? 1 - site.free / site.total : 0;
  const kind = site.view.connected ? (site.view.duty.state === "open" ? "" : "closed") : "away";
  return html`<g>
    <circle class=${`site ${kind}`} cx=${x} cy=${y} r=${RADIUS}/>
    <circle class="used" cx=${x} cy=${y} r=${Math.sqrt(used) * (RADIUS - 1)}/>
    <text class="name" x=${x} y=${y + RADIUS + 16} text-anchor="middle">${site.name.slice(0, 24)}</text>
    <text class="note" x=${x} y=${y + 4} text-anchor="middle">${site.view.connected ? `${count(site.free)} free` : "away"}</text>
    <text class="note" x=${x} y=${y + RADIUS + 30} text-anchor="middle">${counted(site.total, "chip")}, ${site.view.cluster.owner.slice(0, 20)}</text>
  </g>`;
}
