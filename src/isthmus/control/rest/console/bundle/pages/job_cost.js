// The cost of a job so far, by the ledger, and to come, by the plan's prediction and the steps that are left.

import { get } from "../lib/api.js";
import { cents, count, millionths, short } from "../lib/text.js";
import { Card, Facts, html, Problem, Table, useEffect, useState } from "../lib/ui.js";

const EVERY_MS = 10000;
const MAX_MONTHS = 12;

export function JobCost({ job, metrics }) {
  const { statements, error } = useStatements(job);
  const currency = statements.find((one) => one.currency)?.currency ?? job.plan.predicted?.currency ?? "";
  const total = statements.reduce((sum, one) => sum + one.total_cents, 0);
  const lines = statements.flatMap((one) => one.lines);
  const steps = job.job.training?.steps ?? 0;
  const done = Math.min(steps, (metrics.table.steps().at(-1) ?? -1) + 1);
  const each = job.plan.predicted?.cost_per_iteration ?? 0;
  const ended = ["succeeded", "failed", "cancelled"].includes(job.state);
  return html`<${Card} title="Cost">
    <${Facts} facts=${[
      ["So far", html`<span id="cost">${cents(total, currency)}</span>`],
      ["To come, predicted", ended ? "nothing: it has ended" : each ? `${short((steps - done) * each)} ${job.plan.predicted.currency} for ${count(steps - done)} steps` : "not predicted"],
      ["Predicted for a step", each ? `${short(each)} ${job.plan.predicted.currency}` : ""],
    ]}/>
    <${Problem} error=${error}/>
    <${Table} label="Lines of the statement" rows=${lines} empty="Nothing was charged." columns=${[
      ["Site", (one) => one.cluster],
      ["What", (one) => [one.kind, one.phase].filter(Boolean).join(", ")],
      ["Of", (one) => one.resource],
      ["Hours", (one) => short(one.quantity), "number"],
      ["Amount", (one) => millionths(one.millionths, currency), "number"],
    ]}/>
  </${Card}>`;
}

// Return the statements of the months from the job's submission until now.
function useStatements(job) {
  const [found, set] = useState({ statements: [], error: null });
  useEffect(() => {
    let wanted = true;
    const load = async () => {
      try {
        const path = `/v1/statements/job/${encodeURIComponent(job.id)}?month=`;
        const statements = await Promise.all(months(job.submitted_s).map((one) => get(path + one)));
        if (wanted) set({ statements, error: null });
      } catch (error) {
        if (wanted && !(error instanceof TypeError)) set((old) => ({ ...old, error }));
      }
    };
    load();
    const timer = setInterval(load, EVERY_MS);
    return () => ((wanted = false), clearInterval(timer));
  }, [job.id, job.state]);
  return found;
}

function months(from_s) {
  const found = [];
  const now = new Date();
  for (let at = now; found.length < MAX_MONTHS; at = new Date(Date.UTC(at.getUTCFullYear(), at.getUTCMonth() - 1, 1))) {
    found.unshift(at.toISOString().slice(0, 7));
    if (found[0] <= new Date(from_s * 1000).toISOString().slice(0, 7)) break;
  }
  return found;
}
