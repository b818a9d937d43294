// Loss and throughput by step.

import { Chart } from "../lib/chart.js";
import { Card, html, useMemo } from "../lib/ui.js";

export function JobCharts({ metrics }) {
  const found = useMemo(() => {
    const loss = metrics.table.series("loss");
    return { loss, rate: metrics.table.series("tokens_per_s"), held: metrics.table.series("validation_loss") };
  }, [metrics.version]);
  const charts = [
    ["Loss", "nats", found.loss, "--train"],
    ["Throughput", "tokens/s", found.rate, "--rate"],
    ["Held-out loss", "nats", found.held, "--held"],
  ].filter(([, , data]) => data[0].length > 0);
  if (!charts.length) return null;
  return html`<div class="grid">${charts.map(([name, unit, data, colour]) => html`<${Card} title=${name} key=${name}>
    <${Chart} name=${name} unit=${unit} data=${data} colour=${colour}/></${Card}>`)}</div>`;
}
