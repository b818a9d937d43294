// Submit a job: its text, a dry run with plans side by side, place, expected start and victims, then the submission.

import { post } from "../lib/api.js";
import { useAction } from "../lib/live.js";
import { Card, html, Problem, useRef, useState } from "../lib/ui.js";
import { Standing, VictimTable } from "./job_wait.js";
import { Checks, Plans } from "./plans.js";

const EXAMPLE = `version: 1
name: first-job
model: /models/my-model        # a folder at the sites: paste its config.json below; or catalogue:NAME
data:
  paths: [/data/text]
  tokenizer: bytes
training:
  steps: 100
  sequence_length: 1024
  micro_batch_size: 1
  global_batch_size: 16
checkpoints:
  folder: /checkpoints/{job}
output: /results/{job}
policy: manual                 # you choose the plan; auto takes the fastest
`;

export function SubmitPage() {
  const text = useRef(null);
  const config = useRef(null);
  const key = useRef(crypto.randomUUID());
  const { busy, error, run } = useAction();
  const [found, setFound] = useState(null);
  const read = () => post("/v1/jobs:read", { text: text.current.value, config: config.current.value });
  const plan = (event) => {
    event.preventDefault();
    setFound(null);
    run(async () => setFound(await post("/v1/jobs:dry-run", await read())));
  };
  const submit = () => run(async () => {
    const job = await post("/v1/jobs", { ...(await read()), key: key.current });
    location.hash = `#/job/${encodeURIComponent(job.id)}`;
  });
  const changed = () => {
    key.current = crypto.randomUUID(); // another job: a repeated one returns the first
    setFound(null);
  };
  return html`
    <h1 tabindex="-1">Submit</h1>
    <p class="lead">Plan first: nothing is stored. Paths are those at the sites; see docs/formats.md for every field.</p>
    <${Card} title="Job"><form onSubmit=${plan}>
      <${Text} id="job" label="job.yaml" field=${text} rows="17" value=${EXAMPLE} changed=${changed}/>
      <${Text} id="config" label="config.json of the model, if the model is a folder" field=${config} rows="5" value="" changed=${changed}/>
      <div class="row">
        <button disabled=${busy}>Plan it (dry run)</button>
        <button type="button" class="plain" disabled=${busy} onClick=${submit}>Submit</button>
        ${busy && html`<span role="status">Working</span>`}
      </div>
      <${Problem} error=${error}/>
    </form></${Card}>
    ${found && html`<${Answer} found=${found} submit=${submit} busy=${busy}/>`}`;
}

// A text that is typed, pasted, or read from a file.
function Text({ id, label, field, rows, value, changed }) {
  const upload = async (event) => {
    const file = event.target.files[0];
    if (!file) return;
    field.current.value = (await file.slice(0, 1 << 18).text()).slice(0, 1 << 18);
    changed();
  };
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <textarea id=${id} ref=${field} rows=${rows} defaultValue=${value} spellcheck="false" maxlength=${1 << 18} onInput=${changed}></textarea>
    <label>or a file <input type="file" accept=".yaml,.yml,.json,.txt" onChange=${upload}/></label>
  </div>`;
}

function Answer({ found, submit, busy }) {
  return html`
    <${Card} title="Candidate plans">
      <p class="lead">Fastest first. After submission you choose one, or with policy: auto the first is taken.</p>
      <${Plans} plans=${found.plans.plans}/>
      ${found.plans.refused.length > 0 && html`<details><summary>${found.plans.refused.length} rejected combinations</summary>
        <ul>${found.plans.refused.slice(0, 50).map((one, at) => html`<li key=${at}>${one.clusters.join(", ")}: ${one.reason}</li>`)}</ul></details>`}
    </${Card}>
    <${Card} title="If you submit it now"><${Standing} status=${found.standing}/></${Card}>
    ${found.victims.length > 0 && html`<${Card} title="It could preempt"><${VictimTable} victims=${found.victims}/></${Card}>`}
    <${Checks} checks=${found.preflight}/>
    <div class="row"><button type="button" disabled=${busy} onClick=${submit}>Submit this job</button></div>`;
}
