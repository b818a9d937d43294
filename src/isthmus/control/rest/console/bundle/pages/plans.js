// Candidate plans side by side, and the checks of a job's files at the sites.

import { bytes, counted, percent, seconds, short } from "../lib/text.js";
import { Card, html, Table } from "../lib/ui.js";

// `act` is [label, (plan) => ..., busy] of the button of each plan; `chosen` the id of the plan of the job.
export function Plans({ plans, act = null, chosen = "" }) {
  if (!plans.length) return html`<p class="none">No plan.</p>`;
  const best = (read) => Math.min(...plans.map((plan) => read(plan.predicted) || Infinity));
  const fastest = best((one) => one?.iteration_s);
  const cheapest = best((one) => one?.cost_per_iteration);
  return html`<ul class="plans">${plans.slice(0, 24).map((plan) => html`<li key=${plan.id} class=${`plan ${plan.id === chosen ? "chosen" : ""}`}>
    <h3>${route(plan)}</h3><span class="hint mono">${plan.id}</span>
    <dl>${facts(plan).map(([name, value, of]) => html`<dt>${name}</dt>
      <dd class=${plans.length > 1 && ((of === "time" && plan.predicted.iteration_s === fastest) || (of === "cost" && plan.predicted.cost_per_iteration === cheapest)) ? "best" : ""}>${value}</dd>`)}</dl>
    ${plan.why && html`<p class="hint">${plan.why}</p>`}
    ${act && html`<button type="button" disabled=${act[2]} onClick=${() => act[1](plan)} aria-label=${`${act[0]} ${plan.id}`}>${act[0]}</button>`}
  </li>`)}</ul>`;
}

// Return the sites of the first replica in the order of its stages.
function route(plan) {
  const first = plan.stages.filter((one) => one.replica === 0).map((one) => one.cluster);
  return first.filter((site, at) => site !== first[at - 1]).join(" > ");
}

function facts(plan) {
  const first = plan.stages.filter((one) => one.replica === 0);
  const known = plan.predicted;
  const shape = [
    ["Stages", `${first.length}${plan.dp > 1 ? ` x ${plan.dp} replicas` : ""}`],
    ["Layers", first.map((one) => one.layers[1] - one.layers[0]).join(" + ").slice(0, 60)],
    ["Schedule", plan.schedule],
  ];
  if (!known) return shape;
  return [
    ["Iteration", seconds(known.iteration_s), "time"],
    ["Tokens/s", short(known.samples_per_s * plan.sequence_length, 4)],
    ["Cost of a step", known.cost_per_iteration ? `${short(known.cost_per_iteration)} ${known.currency}` : "", "cost"],
    ["Use of the chips", known.mfu_fraction ? percent(known.mfu_fraction) : ""],
    ["Between sites", known.wan_gbps.length ? `${known.wan_gbps.map((one) => short(one)).join(", ").slice(0, 60)} Gbit/s` : "nothing"],
    ["Peak memory", bytes(Math.max(0, ...known.peak_memory_bytes))],
    ["Files to bring", known.bring_s ? seconds(known.bring_s) : ""],
    ...shape,
  ].filter(([, value]) => value !== "");
}

export function Checks({ checks }) {
  if (!checks.length) return null;
  const rows = checks.flatMap((site) => (site.results.length ? site.results : [null]).map((one) => [site, one]));
  const passed = rows.filter(([, one]) => one?.status === "passed");
  const open = rows.filter((row) => !passed.includes(row));
  return html`<${Card} title="Checks at the sites">
    <p>${checks.map((site) => `${site.cluster}: ${site.state}`).join(", ")}</p>
    ${open.length > 0 && html`<${CheckTable} rows=${open} label="Open checks"/>`}
    ${passed.length > 0 && html`<details><summary>${counted(passed.length, "check")} passed</summary>
      <${CheckTable} rows=${passed} label="Passed checks"/></details>`}
  </${Card}>`;
}

function CheckTable({ rows, label }) {
  return html`<${Table} label=${label} rows=${rows} columns=${[
    ["Site", ([site]) => site.cluster],
    ["Check", ([site, one]) => (one ? `${one.name}: ${one.status}` : site.state)],
    ["Found", ([, one]) => (one ? [one.detail, one.hint].filter(Boolean).join(" ") : "")],
  ]}/>`;
}
