// The published prices in force and to come.

import { useData } from "../lib/live.js";
import { millionths, time } from "../lib/text.js";
import { Card, html, Problem, Table } from "../lib/ui.js";

const clock = (min) => `${String(Math.floor(min / 60)).padStart(2, "0")}:${String(min % 60).padStart(2, "0")}`;

export function PriceList({ version = 0 }) {
  const { data, error } = useData(`/v1/tariffs?v=${version}`, 30000);
  return html`<${Card} title="Prices">
    <${Problem} error=${error}/>
    ${data && html`<${Table} label="Prices" rows=${data.prices} empty="No prices are published: nothing is charged." columns=${[
      ["Of", (one) => one.resource],
      ["Priority", (one) => one.job_class],
      ["Hours (UTC)", (one) => (one.begin_min === 0 && one.end_min === 1440 ? "all day" : `${clock(one.begin_min)}-${clock(one.end_min)}`)],
      ["From", (one) => (one.begins_ms > Date.now() ? time(one.begins_ms / 1000) : `in force since ${time(one.begins_ms / 1000)}`)],
      ["For an hour", (one) => millionths(one.price_millionths, data.currency), "number"],
    ]}/>
    ${data.more && html`<p class="hint">More prices are published than this list holds.</p>`}`}
    <p class="hint">A chip of a node group (site/group), a terabyte of storage, or a Gbit/s of a link (from>to).</p>
  </${Card}>`;
}
