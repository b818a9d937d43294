// Why a job waits, the jobs ahead of it, when it may start, and the jobs that it could preempt.

import { post } from "../lib/api.js";
import { useAction, useData } from "../lib/live.js";
import { count, seconds } from "../lib/text.js";
import { Card, Facts, html, JobLink, Problem, Table, useEffect } from "../lib/ui.js";
import { Start } from "./queue.js";

const EVERY_MS = 5000;

export function Waiting({ path, version }) {
  const { data, reload } = useData(`${path}/queue`, EVERY_MS);
  useEffect(() => void reload(), [version]);
  return data && html`<${Card} title="Why it waits"><${Standing} status=${data}/></${Card}>`;
}

// The queue status of a job, also of one that was not submitted.
export function Standing({ status }) {
  return html`
    <p>${status.reason || "It can start now."}</p>
    <${Facts} facts=${[
      ["Place", status.place ? count(status.place) : ""],
      ["Expected start", html`<${Start} status=${status}/>`],
      ["Needs", Object.entries(status.needs).map(([site, groups]) => `${site}: ${Object.entries(groups).map(([group, number]) => `${number} ${group}`).join(", ")}`).join("; ")],
    ]}/>
    ${status.refused.length > 0 && html`<h3>Missing</h3><ul>${status.refused.map((one, at) => html`<li key=${at}>${one.clusters.join(", ")}: ${one.reason}</li>`)}</ul>`}
    ${status.ahead.length > 0 && html`<h3>Jobs ahead on the same chips</h3><ul>${status.ahead.map((one, at) => html`
      <li key=${at}>${one.job ? html`<${JobLink} id=${one.job}/>` : "a job of another user"}, ${one.state}, priority ${one.priority}</li>`)}</ul>`}
    ${status.notes.map((note, at) => html`<p class="hint" key=${at}>${note}</p>`)}`;
}

export function VictimTable({ victims }) {
  return html`<${Table} label="Jobs that could be preempted" rows=${victims} columns=${[
    ["Site", (one) => one.cluster],
    ["Owner", (one) => one.owner],
    ["Job", (one) => one.job],
    ["Chips", (one) => Object.entries(one.chips).map(([group, number]) => `${number} ${group}`).join(", ")],
    ["Work since its checkpoint", (one) => seconds(one.unsaved_s), "number"],
  ]}/>`;
}

export function Victims({ job, path }) {
  const { busy, error, run } = useAction();
  const victims = job.offer.map(({ cluster, job: id, attempt }) => ({ cluster, job: id, attempt }));
  return html`<${Card} title="It could preempt">
    <p class="lead">All of them or none. Each job of the pool saves a verified checkpoint before it stops.</p>
    <${VictimTable} victims=${job.offer}/>
    <div class="row"><button type="button" class="danger" disabled=${busy}
      onClick=${() => run(() => post(`${path}/preempt`, { victims }))}>Preempt ${victims.length === 1 ? "this job" : `these ${victims.length} jobs`}</button></div>
    <${Problem} error=${error}/>
  </${Card}>`;
}
