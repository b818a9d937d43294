// The timeline of the newest step: what each rank computes, and what crosses each link, on one clock.

import { seconds } from "../lib/text.js";
import { Card, html, useMemo } from "../lib/ui.js";

const LANE = 22;
const LEFT = 190;
const WIDTH = 1100;
const MAX_LANES = 48;
const KINDS = ["forward", "backward", "receive", "send", "update", "reduce", "exchange"];

export function Timeline({ plan, metrics }) {
  const found = useMemo(() => layOut(plan, metrics.table), [plan, metrics.version]);
  if (!found) return null;
  const { lanes, span_s, step, hidden } = found;
  const height = lanes.length * LANE + 26;
  const x = (at_s) => LEFT + (at_s / span_s) * (WIDTH - LEFT - 10);
  const kinds = KINDS.filter((kind) => lanes.some((lane) => lane.bars.some((bar) => bar.kind.startsWith(kind))));
  return html`<${Card} title="Stages and links" aside=${html`<span class="hint">step ${step}, ${seconds(span_s)}</span>`}>
    <div class="legend">${kinds.map((kind) => html`<span key=${kind}><i class=${`mark k-${kind}`}></i>${kind}</span>`)}</div>
    <div class="scroll" tabindex="0" role="region" aria-label="Timeline of a step">
    <svg class="timeline" viewBox=${`0 0 ${WIDTH} ${height}`} role="img" aria-label=${`Step ${step}: ${lanes.length} lanes, ${seconds(span_s)}`}>
      ${lanes.map((lane, at) => html`<g key=${lane.name}>
        <text x="0" y=${at * LANE + 15} class=${lane.link ? "" : "group"}>${lane.name.slice(0, 30)}</text>
        <rect class="lane" x=${LEFT} y=${at * LANE + 3} width=${WIDTH - LEFT - 10} height=${LANE - 6}/>
        ${lane.bars.map((bar, n) => html`<rect key=${n} class=${`k-${kindOf(bar.kind)}`} x=${x(bar.from)} y=${at * LANE + 3}
          width=${Math.max(0.6, x(bar.to) - x(bar.from))} height=${LANE - 6}><title>${bar.kind} ${seconds(bar.to - bar.from)}</title></rect>`)}
      </g>`)}
      ${[0, 0.25, 0.5, 0.75, 1].map((part) => html`<text key=${part} x=${x(part * span_s)} y=${height - 6} text-anchor=${part === 1 ? "end" : "start"}>${seconds(part * span_s)}</text>`)}
    </svg></div>
    ${hidden > 0 && html`<p class="hint">${hidden} more lanes are left out; isthmus report draws all.</p>`}
  </${Card}>`;
}

const kindOf = (kind) => KINDS.find((one) => kind === one || kind.startsWith(one)) ?? "other";

// Return the lanes of the newest step with spans: one of each rank, one of each direction between sites.
function layOut(plan, table) {
  const ranks = table.newest === null ? [] : table.rank(table.newest).filter((one) => one.spans.length);
  if (!ranks.length) return null;
  const ahead = offsets(ranks);
  const at = (rank, time) => time - (ahead.get(rank) ?? 0);
  const lanes = ranks.map((one) => ({
    name: `${one.cluster ?? "?"} rank ${one.rank}`, link: false,
    bars: one.spans.map((span) => ({ kind: span.kind, from: at(one.rank, span.start_s), to: at(one.rank, span.end_s) })),
  }));
  const sites = new Map(ranks.map((one) => [one.rank, one.cluster]));
  const links = new Map();
  for (const one of ranks) for (const message of one.messages) {
    const source = sites.get(message.source);
    if (!source || source === one.cluster) continue;
    const name = `${source} > ${one.cluster}`;
    const lane = links.get(name) ?? { name, link: true, bars: [] };
    lane.bars.push({ kind: message.kind, from: at(one.rank, message.first_left_s), to: at(one.rank, message.arrived_s) });
    links.set(name, lane);
  }
  const all = [...lanes, ...links.values()];
  const times = all.flatMap((lane) => lane.bars.flatMap((bar) => [bar.from, bar.to]));
  const start = times.reduce((least, one) => Math.min(least, one), Infinity);
  const end = times.reduce((most, one) => Math.max(most, one), -Infinity);
  for (const lane of all) for (const bar of lane.bars) [bar.from, bar.to] = [bar.from - start, bar.to - start];
  const shown = all.slice(0, MAX_LANES);
  return { lanes: shown, hidden: all.length - shown.length, span_s: Math.max(1e-6, end - start), step: table.newest };
}

// Return by rank how far its clock is ahead of the first rank's, through chains of messages, which estimate it.
function offsets(ranks) {
  const near = new Map();
  const join = (from, to, ahead) => near.set(from, [...(near.get(from) ?? []), [to, ahead]]);
  for (const one of ranks) for (const message of one.messages) {
    join(one.rank, message.source, message.clock_offset_s);
    join(message.source, one.rank, -message.clock_offset_s);
  }
  const found = new Map();
  for (const one of ranks) {
    if (found.has(one.rank)) continue;
    found.set(one.rank, 0);
    const queue = [one.rank];
    while (queue.length) {
      const rank = queue.shift();
      for (const [other, ahead] of near.get(rank) ?? []) {
        if (found.has(other)) continue;
        found.set(other, found.get(rank) + ahead);
        queue.push(other);
      }
    }
  }
  return found;
}
