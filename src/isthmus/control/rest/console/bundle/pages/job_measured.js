// What the plan predicted beside what the workers measured: medians over the steps, without the first one.

import { percent, seconds, short } from "../lib/text.js";
import { Card, html, Table, useMemo } from "../lib/ui.js";

export function Measured({ job, metrics }) {
  const rows = useMemo(() => compare(job, metrics.table), [job, metrics.version]);
  return html`<${Card} title="Predicted and measured">
    <${Table} label="Predicted and measured" rows=${rows} columns=${[
      ["Figure", (row) => row.name],
      ["Predicted", (row) => row.say(row.predicted), "number"],
      ["Measured", (row) => (row.measured === null ? "not yet" : row.say(row.measured)), "number"],
      ["Measured over predicted", (row) => (row.measured === null || !row.predicted ? "" : percent(row.measured / row.predicted)), "number"],
    ]} empty="The plan has no prediction."/>
    ${job.plan.compute === "virtual" && html`<p class="hint">Virtual chips: each stage computes, then waits as long as the chip would have taken.</p>`}
  </${Card}>`;
}

function compare(job, table) {
  const predicted = job.plan.predicted;
  if (!predicted) return [];
  const tokens = predicted.samples_per_s * job.plan.sequence_length;
  return [
    { name: "Iteration", predicted: predicted.iteration_s, measured: table.median("step_s"), say: seconds },
    { name: "Tokens per second", predicted: tokens, measured: table.median("tokens_per_s"), say: (value) => short(value, 4) },
    { name: "Sent between sites", predicted: sum(predicted.wan_gbps), measured: sent(table), say: (value) => `${short(value)} Gbit/s` },
  ];
}

const sum = (values) => values.reduce((total, one) => total + one, 0);

// Return the mean rate of all ranks between sites over the last steps in Gbit/s, each hop counted once, one way.
function sent(table) {
  const steps = table.steps().slice(-50);
  const times = steps.map((step) => Math.max(0, ...table.rank(step).map((one) => one.values.step_s ?? 0)));
  const bytes = steps.map((step) => sum(table.rank(step).map((one) => one.values.wan_bytes ?? 0)));
  const time_s = sum(times);
  return time_s ? (sum(bytes) * 8) / 1e9 / time_s / 2 : null;
}
