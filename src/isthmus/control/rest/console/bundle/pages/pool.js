// The pool: sites, links, what is reserved on them, and what of the caller's jobs runs over each.

import { useData, useEvents, useThrottled } from "../lib/live.js";
import { bytes, count, counted, percent, short, time } from "../lib/text.js";
import { Bar, Card, html, JobLink, Problem, Table, useMemo, useState } from "../lib/ui.js";
import { PoolMap } from "./pool_map.js";

const REFRESH_MS = 5000;
const SIZE = 50;

export function PoolPage({ session }) {
  const { data, error, reload } = useData("/v1/pool", REFRESH_MS);
  const sees = session.role !== "owner";
  const running = useData(sees ? "/v1/jobs?state=running&state=starting&newest_first=true&limit=50" : null, 0);
  const soon = useThrottled(() => (reload(), running.reload()));
  useEvents((kind) => (kind === "job" || kind === "deleted") && soon(), null, sees);
  const sites = useMemo(() => (data ? data.clusters.map(siteOf) : []), [data]);
  const links = useMemo(() => (data ? linksOf(data, running.data ?? []) : []), [data, running.data]);
  if (!data) return html`<h1 tabindex="-1">Pool</h1><${Problem} error=${error}/><p class="wait">Loading</p>`;
  const total = sites.reduce((sum, one) => sum + one.total, 0);
  const free = sites.reduce((sum, one) => sum + one.free, 0);
  const nodes = sites.reduce((sum, one) => sum + one.nodes, 0);
  return html`
    <h1 tabindex="-1">Pool</h1>
    <p class="lead" id="summary">${counted(sites.length, "site")}, ${counted(nodes, "node")}, ${counted(total, "chip")},
      ${" "}${count(free)} of them free; ${counted(sites.filter((one) => !one.view.connected).length, "site")} away.</p>
    <${Problem} error=${error}/>
    <${Card} title="Map"><${PoolMap} sites=${sites} links=${links}/></${Card}>
    <${Sites} sites=${sites}/>
    <${Card} title="Links">
      <${Table} label="Links" rows=${links.slice(0, 200)} columns=${LINKS} rowKey=${(one) => one.name} empty="No link is known."/>
      <p class="hint">Reserved: what the plans of running jobs need, by prediction. Your jobs: those that you may see.</p>
    </${Card}>`;
}

function Sites({ sites }) {
  const [shown, setShown] = useState(SIZE);
  return html`<${Card} title="Sites">
    <${Table} label="Sites" rows=${sites.slice(0, shown)} columns=${SITES} rowKey=${(one) => one.name}
      empty="No site has joined the pool."/>
    ${shown < sites.length && html`<div class="row"><button type="button" class="plain"
      onClick=${() => setShown(shown + 10 * SIZE)}>Show more of ${count(sites.length)} sites</button></div>`}
  </${Card}>`;
}

export function siteOf(view) {
  const groups = view.cluster.node_groups;
  const total = groups.reduce((sum, one) => sum + one.nodes * one.chips_per_node, 0);
  const free = Object.values(view.free_chips).reduce((sum, one) => sum + one, 0);
  const nodes = groups.reduce((sum, one) => sum + one.nodes, 0);
  return { name: view.cluster.name, view, total, free: view.connected ? free : 0, nodes };
}

export function dutyOf(view) {
  if (!view.connected) return "away";
  return view.duty.state === "open" ? "open" : view.duty.state;
}

const SITES = [
  ["Site", (one) => one.name],
  ["Owner", (one) => one.view.cluster.owner],
  ["State", (one) => html`<span class=${`state s-${one.view.connected ? (one.view.duty.state === "open" ? "good" : "warm") : "bad"}`}>${dutyOf(one.view)}</span>`],
  ["Chips", (one) => one.view.cluster.node_groups.map((group) => `${count(group.nodes)} x ${group.chips_per_node} ${group.chip}`).join(", ")],
  ["In use", (one) => html`<${Bar} fraction=${one.total ? 1 - one.free / one.total : 0} label=${`chips in use at ${one.name}`}/>${count(one.total - one.free)} of ${count(one.total)}`],
  ["Free storage", (one) => (one.view.free_storage_bytes === null ? "" : bytes(one.view.free_storage_bytes)), "number"],
  ["Waiting here", (one) => count(one.view.queue.length), "number"],
  ["Last report", (one) => time(one.view.last_report_s)],
];

// Return the links with what is reserved, and the visible jobs whose plans send over them.
function linksOf(pool, jobs) {
  const use = new Map(pool.use.map((one) => [`${one.from} > ${one.to}`, one.reserved_gbps]));
  const over = new Map();
  for (const job of jobs) for (const name of hops(job.plan)) over.set(name, [...(over.get(name) ?? []), job.id]);
  const rows = [...pool.links.map((one) => ({ ...one, kind: "operator" })), ...pool.measured.map((one) => ({ ...one, kind: "measured" }))];
  return rows.map((one) => {
    const name = `${one.from} > ${one.to}`;
    return { ...one, name, reserved: use.get(name) ?? 0, jobs: over.get(name) ?? [] };
  });
}

// Return the directions between sites over which the stages of a plan follow each other.
function hops(plan) {
  const found = new Set();
  const stages = plan?.stages ?? [];
  stages.forEach((stage, at) => {
    const next = stages[at + 1];
    if (!next || next.replica !== stage.replica || next.cluster === stage.cluster) return;
    found.add(`${stage.cluster} > ${next.cluster}`);
    found.add(`${next.cluster} > ${stage.cluster}`);
  });
  return found;
}

const LINKS = [
  ["Link", (one) => one.name],
  ["Known from", (one) => one.kind],
  ["Capacity", (one) => `${short(one.bandwidth_gbps)} Gbit/s`, "number"],
  ["Round trip", (one) => `${short(one.delay_ms * 2)} ms`, "number"],
  ["Loss", (one) => (one.loss ? percent(one.loss) : "0"), "number"],
  ["Reserved", (one) => html`<${Bar} fraction=${one.reserved / one.bandwidth_gbps} label=${`reserved on ${one.name}`}/>${short(one.reserved)} Gbit/s`],
  ["Your jobs", (one) => one.jobs.slice(0, 5).map((id, at) => html`${at ? ", " : ""}<${JobLink} id=${id}/>`)],
];
