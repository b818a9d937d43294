// A job: state and actions, why it waits, its plans, loss and throughput, stages and links, history, cost and output.

import { post, remove } from "../lib/api.js";
import { useAction, useData, useEvents, useThrottled } from "../lib/live.js";
import { time } from "../lib/text.js";
import { Card, Facts, html, Problem, State, Table, useState } from "../lib/ui.js";
import { JobCharts, RolloutSites } from "./job_charts.js";
import { JobCost } from "./job_cost.js";
import { Waiting, Victims } from "./job_wait.js";
import { JobLog } from "./job_log.js";
import { Measured } from "./job_measured.js";
import { Timeline } from "./job_timeline.js";
import { useMetrics } from "../lib/metrics.js";
import { Checks, Plans } from "./plans.js";

const ENDED = ["succeeded", "failed", "cancelled"];
const WAITING = ["planning", "choosing", "waiting", "blocked"];

export function JobPage({ args }) {
  const id = args[0] ?? "";
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  const job = useData(path);
  const [history, setHistory] = useState([]);
  const metrics = useMetrics(path);
  const reload = useThrottled(job.reload);
  const [lines, setLines] = useState(0);
  useEvents((kind, data) => {
    if (kind === "history") setHistory((old) => add(old, data));
    else if (kind === "lines") (metrics.more(), setLines((old) => old + 1));
    else if (kind === "job" || kind === "deleted") reload();
  }, id, job.error === null);
  if (!job.data) {
    return html`<h1 tabindex="-1">Job ${id}</h1>${job.error ? html`<${Problem} error=${job.error}/>` : html`<p class="wait">Loading</p>`}`;
  }
  const one = job.data;
  return html`
    <h1 tabindex="-1">${one.name} <${State} state=${one.state}/></h1>
    <p class="lead mono">${one.id}</p>
    ${one.reason && html`<p id="reason">${one.reason}</p>`}
    <${Facts} facts=${[
      ["User", one.user], ["Priority", one.job.priority], ["Submitted", time(one.submitted_s)],
      ["Changed", time(one.changed_s)], ["Attempt", one.attempt || ""], ["Restarts", one.restarts || ""],
      ["Workers replaced", one.worker_restarts || ""], ["Place", one.place ?? ""], ["Model", one.job.model],
      ["Steps", one.job.training?.steps ?? ""],
    ]}/>
    <${Actions} job=${one} path=${path}/>
    ${WAITING.includes(one.state) && html`<${Waiting} path=${path} version=${one.changed_s}/>`}
    ${one.offer.length > 0 && html`<${Victims} job=${one} path=${path}/>`}
    ${one.state === "choosing" && html`<${Choice} job=${one} path=${path}/>`}
    ${one.state !== "choosing" && one.plan && html`<${Card} title="Plan">
      <${Plans} plans=${[one.plan]} chosen=${one.plan.id}/></${Card}>`}
    <${JobCharts} metrics=${metrics}/>
    ${one.plan && html`<div class="grid"><${Measured} job=${one} metrics=${metrics}/><${JobCost} job=${one} metrics=${metrics}/></div>`}
    ${one.plan && html`<${RolloutSites} plan=${one.plan} metrics=${metrics}/>`}
    ${one.plan && html`<${Timeline} plan=${one.plan} metrics=${metrics}/>`}
    <${Parts} parts=${one.parts}/>
    <${Checks} checks=${one.preflight}/>
    <${History} events=${history}/>
    <${JobLog} path=${path} version=${lines}/>`;
}

// Add an event to a history; after a reconnection the server sends all again, with their numbers.
function add(events, one) {
  if (events.some((known) => known.number === one.number)) return events;
  return [...events, one].sort((a, b) => a.number - b.number);
}

function Actions({ job, path }) {
  const { busy, error, run } = useAction();
  const [asked, ask] = useState("");
  const ended = ENDED.includes(job.state);
  const act = ended ? "Delete" : "Cancel";
  const confirm = () => run(async () => {
    if (ended) {
      await remove(path);
      location.hash = "#/jobs";
    } else await post(`${path}/cancel`);
  }).then(() => ask(""));
  return html`<div class="row">
      ${asked !== act && html`<button type="button" class="danger" onClick=${() => ask(act)}>${act} the job</button>`}
      ${asked === act && html`<span>${ended ? "Delete it with its metrics and output?" : "Stop it at all sites?"}</span>
        <button type="button" class="danger" disabled=${busy} onClick=${confirm}>Yes, ${act.toLowerCase()} it</button>
        <button type="button" class="plain" onClick=${() => ask("")}>No</button>`}
    </div><${Problem} error=${error}/>`;
}

function Choice({ job, path }) {
  const { busy, error, run } = useAction();
  const choose = (plan) => run(() => post(`${path}/choose`, { plan: plan.id }));
  const plans = job.plans?.plans ?? [];
  return html`<${Card} title="Choose a plan">
    <p class="lead">Fastest first. The job starts with the plan that you choose, once its chips are free.</p>
    <${Problem} error=${error}/>
    <${Plans} plans=${plans} act=${["Choose", choose, busy]}/>
  </${Card}>`;
}

function Parts({ parts }) {
  return html`${parts.length > 0 && html`<${Card} title="Parts"><${Table} label="Parts" rows=${parts} columns=${[
    ["Site", (one) => one.cluster],
    ["Owner", (one) => one.owner],
    ["Ranks", (one) => ranges(one.ranks)],
    ["Wanted", (one) => one.desired],
    ["Reported", (one) => one.observed],
    ["Detail", (one) => one.waiting ? `${one.detail} ${one.waiting}`.trim() : one.detail],
  ]}/></${Card}>`}`;
}

function ranges(ranks) {
  if (ranks.length < 3) return ranks.join(", ");
  const together = ranks[ranks.length - 1] - ranks[0] === ranks.length - 1;
  return together ? `${ranks[0]} to ${ranks[ranks.length - 1]}` : `${ranks.length} ranks from ${ranks[0]} on`;
}

const FAULTS = ["worker-lost", "stalled", "left", "lost", "refused", "preempted", "failed"];

function History({ events }) {
  const shown = events.slice(-200).reverse();
  return html`<${Card} title="History"><${Table} label="History" rows=${shown} rowKey=${(one) => one.number} columns=${[
    ["Time", (one) => time(one.time_s)],
    ["What", (one) => html`<span class=${FAULTS.includes(one.kind) ? "s-bad" : ""}>${one.kind}</span>`],
    ["Step", (one) => one.step ?? "", "number"],
    ["Where", (one) => [one.cluster, one.rank === null || one.rank === undefined ? "" : `rank ${one.rank}`].filter(Boolean).join(", ")],
    ["Detail", (one) => [one.text, one.job].filter(Boolean).join(" ")],
  ]} empty="Nothing has happened yet."/></${Card}>`;
}
