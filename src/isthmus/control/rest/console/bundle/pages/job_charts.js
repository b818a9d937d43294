// Loss and throughput by step; of a job that trains on its own responses also its samples and sites that decode.

import { Chart } from "../lib/chart.js";
import { percent, short } from "../lib/text.js";
import { Card, html, Table, useMemo } from "../lib/ui.js";

const SAMPLES = [
  ["reward", "Reward", ""], ["validation_reward", "Held-out reward", ""], ["entropy", "Entropy", "nats"],
  ["clipped_share", "Clipped", "share"], ["kl_rollout", "Train/rollout KL", "nats"],
  ["kl_reference", "KL to the first weights", "nats"],
  ["effective_samples", "Effective sample size", "share"], ["staleness", "Staleness", "versions"],
  ["response_tokens", "Response length", "tokens"], ["turns", "Turns", ""], ["cut_share", "Cut off", "share"],
  ["filtered_groups", "Filtered groups", "groups"],
];
const CAUSES = [["Decodes", "decode_s"], ["No samples", "wait_samples_s"], ["No weights", "wait_weights_s"], ["No link", "wait_link_s"]];
const RECENT = 10;

// Where the ranks that decode spent their time over the last steps.
export function RolloutSites({ plan, metrics }) {
  const rows = useMemo(() => rolloutRows(plan, metrics.table), [plan, metrics.version]);
  if (!rows.length) return null;
  return html`<${Card} title="Decoding by site"><${Table} label="Decoding by site" rows=${rows} columns=${[
    ["Rank", (row) => row.rank, "number"], ["Cluster", (row) => row.cluster],
    ["Tokens/s", (row) => short(row.rate), "number"],
    ...CAUSES.map(([title, key]) => [title, (row) => (row.total_s ? percent(row[key] / row.total_s) : ""), "number"]),
  ]}/></${Card}>`;
}

function rolloutRows(plan, table) {
  return (plan.rollouts ?? []).flatMap((place, at) => {
    const rank = plan.ranks.length + at;
    const lines = table.steps().map((step) => table.rank(step).find((one) => one.rank === rank)).filter(Boolean).slice(-RECENT);
    if (!lines.length) return [];
    const mean = (key) => lines.reduce((total, one) => total + (one.values[key] ?? 0), 0) / lines.length;
    const spent = Object.fromEntries(CAUSES.map(([, key]) => [key, mean(key)]));
    const total_s = Object.values(spent).reduce((total, one) => total + one, 0);
    return [{ rank, cluster: place.cluster, rate: mean("rollout_tokens_per_s"), ...spent, total_s }];
  });
}

export function JobCharts({ metrics }) {
  const found = useMemo(() => {
    const loss = metrics.table.series("loss");
    const samples = SAMPLES.map(([key, ...said]) => [...said, metrics.table.series(key)]);
    return { loss, samples, rate: metrics.table.series("tokens_per_s"), held: metrics.table.series("validation_loss") };
  }, [metrics.version]);
  const charts = [
    ["Loss", "nats", found.loss, "--train"],
    ["Throughput", "tokens/s", found.rate, "--rate"],
    ["Held-out loss", "nats", found.held, "--held"],
    ...found.samples.map(([name, unit, data]) => [name, unit, data, "--train"]),
  ].filter(([, , data]) => data[0].length > 0);
  if (!charts.length) return null;
  return html`<div class="grid">${charts.map(([name, unit, data, colour]) => html`<${Card} title=${name} key=${name}>
    <${Chart} name=${name} unit=${unit} data=${data} colour=${colour}/></${Card}>`)}</div>`;
}
