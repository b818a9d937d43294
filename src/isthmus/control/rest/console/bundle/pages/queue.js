// The queue: place, reason, jobs ahead and expected start of each waiting job, one page of the server at a time.

import { useData, useEvents, useThrottled } from "../lib/live.js";
import { Pager } from "../lib/pager.js";
import { count, seconds, time } from "../lib/text.js";
import { Card, html, JobLink, Problem, State, Table, useState } from "../lib/ui.js";

const SIZE = 50;

export function QueuePage({ session }) {
  const [start, go] = useState(0);
  const { data, error, reload } = useData(`/v1/queue/page?start=${start}&limit=${SIZE}`, 15000);
  const other = useData("/v1/queue", 0);
  const soon = useThrottled(() => (reload(), other.reload()));
  useEvents((kind) => (kind === "job" || kind === "deleted") && soon());
  const outside = (other.data ?? []).filter((one) => one.place === null);
  return html`
    <h1 tabindex="-1">Queue</h1>
    <p class="lead">${session.role === "admin" ? "All jobs that wait for chips" : "Your jobs that wait for chips"},
      first to start first.</p>
    <${Problem} error=${error}/>
    <${Card} title="Waiting for chips" aside=${data && html`<span class="hint" id="length">${count(data.length)} jobs</span>`}>
      ${data && html`<${Table} label="Waiting for chips" columns=${COLUMNS} rows=${data.jobs} rowKey=${(one) => one.id}
        empty="No job waits for chips."/>
      <${Pager} start=${start} length=${data.length} size=${SIZE} go=${go} label="Pages of the queue"/>`}
    </${Card}>
    ${outside.length > 0 && html`<${Card} title="Not in the queue yet">
      <${Table} label="Not in the queue yet" rows=${outside} rowKey=${(one) => one.id}
        columns=${[JOB, STATE, ["Why", (one) => one.reason], SUBMITTED]}/>
    </${Card}>`}`;
}

const JOB = ["Job", (one) => html`<${JobLink} id=${one.id}/>`];
const STATE = ["State", (one) => html`<${State} state=${one.state}/>`];
const SUBMITTED = ["Submitted", (one) => time(one.submitted_s)];
const COLUMNS = [
  ["Place", (one) => count(one.place), "number"],
  JOB,
  ["User", (one) => one.user],
  STATE,
  ["Priority", (one) => one.priority],
  ["Why it waits", (one) => one.reason],
  ["Jobs ahead", (one) => (one.start_s === null && !one.ahead.length ? "" : count(one.ahead.length)), "number"],
  ["Expected start", (one) => html`<${Start} status=${one}/>`],
  SUBMITTED,
];

// The expected start of a job with its band: 90 % if run times deviate by up to 20 %.
export function Start({ status }) {
  if (status.start_s === null) return status.earliest_s === null ? "unknown" : html`not before ${time(status.earliest_s)}`;
  const wait_s = Math.max(0, status.start_s - Date.now() / 1000);
  const from = status.earliest_s === null ? "" : time(status.earliest_s);
  const to = status.latest_s === null ? "open" : time(status.latest_s);
  return html`<span>in ${seconds(wait_s)}<br/><span class="hint">${from} to ${to}</span></span>`;
}
