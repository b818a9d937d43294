// The jobs of the caller, newest first, one page of the server at a time; states change as events arrive.

import { request } from "../lib/api.js";
import { useEvents } from "../lib/live.js";
import { time } from "../lib/text.js";
import { Card, html, JobLink, Problem, State, Table, useCallback, useEffect, useState } from "../lib/ui.js";

const SIZE = 50;
const STATES = [
  "", "planning", "choosing", "waiting", "blocked", "preempting", "preparing", "starting", "running", "stopping",
  "succeeded", "failed", "cancelled",
];

export function JobsPage({ session }) {
  const [wanted, setWanted] = useState("");
  const [pages, setPages] = useState([""]); // the cursors of the pages up to the one shown
  const [found, setFound] = useState({ jobs: [], next: null, error: null });
  const after = pages[pages.length - 1];
  const load = useCallback(async () => {
    const state = wanted ? `&state=${wanted}` : "";
    const cursor = after ? `&after=${encodeURIComponent(after)}` : "";
    try {
      const [jobs, headers] = await request("GET", `/v1/jobs?newest_first=true&limit=${SIZE}${state}${cursor}`);
      setFound({ jobs, next: headers.get("Isthmus-Next-Job"), error: null });
    } catch (error) {
      setFound((old) => ({ ...old, error }));
    }
  }, [wanted, after]);
  useEffect(() => void load(), [load]);
  useEvents((kind, data) => {
    if (kind === "hello" || kind === "deleted") load();
    if (kind !== "job") return;
    const known = found.jobs.some((one) => one.id === data.id);
    if (known) setFound((old) => ({ ...old, jobs: old.jobs.map((one) => (one.id === data.id ? data : one)) }));
    else if (!after && (!wanted || wanted === data.state)) {
      setFound((old) => ({ ...old, jobs: insert(old.jobs, data).slice(0, SIZE) }));
    }
  });
  const filter = (event) => {
    setWanted(event.target.value);
    setPages([""]);
  };
  return html`
    <h1 tabindex="-1">Jobs</h1>
    <p class="lead">${session.role === "admin" ? "The jobs of all users" : "Your jobs"}, newest first.
      <a href="#/submit">Submit a job</a></p>
    <${Problem} error=${found.error instanceof TypeError ? null : found.error}/>
    <${Card} title="Jobs" aside=${html`<label>State <select value=${wanted} onChange=${filter}>
        ${STATES.map((one) => html`<option value=${one} key=${one}>${one || "any"}</option>`)}</select></label>`}>
      <${Table} label="Jobs" columns=${COLUMNS} rows=${found.jobs} rowKey=${(one) => one.id} empty="No job."/>
      ${(found.next || pages.length > 1) && html`<nav class="pager" aria-label="Pages of the jobs">
        <button type="button" class="plain" disabled=${pages.length === 1}
          onClick=${() => setPages(pages.slice(0, -1))}>Newer</button>
        <button type="button" class="plain" disabled=${!found.next}
          onClick=${() => setPages([...pages, found.next])}>Older</button>
      </nav>`}
    </${Card}>`;
}

// Insert a job by its time of submission, newest first.
function insert(jobs, job) {
  const at = jobs.findIndex((one) => one.submitted_s <= job.submitted_s);
  return at < 0 ? [...jobs, job] : [...jobs.slice(0, at), job, ...jobs.slice(at)];
}

const COLUMNS = [
  ["Job", (one) => html`<${JobLink} id=${one.id}/>`],
  ["Name", (one) => one.name],
  ["User", (one) => one.user],
  ["State", (one) => html`<${State} state=${one.state}/>`],
  ["Why", (one) => one.reason],
  ["Where", (one) => [...new Set(one.parts.map((part) => part.cluster))].join(", ")],
  ["Attempt", (one) => (one.attempt ? String(one.attempt) : ""), "number"],
  ["Submitted", (one) => time(one.submitted_s)],
];
