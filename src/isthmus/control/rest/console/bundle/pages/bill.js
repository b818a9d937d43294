// What a user has used and owes, and the prices in force.

import { useData } from "../lib/live.js";
import { short } from "../lib/text.js";
import { Statement } from "../lib/statement.js";
import { Card, html, Table } from "../lib/ui.js";
import { PriceList } from "./price_list.js";

export function BillPage({ session }) {
  const { data } = useData("/v1/usage", 15000);
  return html`
    <h1 tabindex="-1">Bill</h1>
    <p class="lead">What your jobs cost, by the ledger of the pool.</p>
    <${Statement} party="user" name=${session.name} title="Statement" links/>
    <${Card} title="Chip-hours"><${Table} label="Chip-hours" rows=${data?.rows ?? []} columns=${[
      ["Site", (one) => one.cluster],
      ["Owner", (one) => one.owner],
      ["Chip-hours", (one) => short(one.chip_hours, 4), "number"],
      ["Chips now", (one) => String(one.num_chips), "number"],
    ]} empty="No chip was used yet."/></${Card}>
    <${PriceList}/>`;
}
