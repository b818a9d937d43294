// The statement of an owner or a user for a month.

import { useData } from "./live.js";
import { OwnerWaits } from "./owner_waits.js";
import { cents, millionths, short, time } from "./text.js";
import { Card, Facts, html, JobLink, Problem, Table, useState } from "./ui.js";

const MAX_LINES = 200;
const EVERY_MS = 15000;

export function Statement({ party, name, title, links = false }) {
  const [month, setMonth] = useState(new Date().toISOString().slice(0, 7));
  const { data, error } = useData(`/v1/statements/${party}/${encodeURIComponent(name)}?month=${month}`, EVERY_MS);
  const pick = (event) => /^\d{4}-\d{2}$/.test(event.target.value) && setMonth(event.target.value);
  return html`<${Card} title=${title} aside=${html`<label>Month <input id="month" type="month" value=${month} onChange=${pick}/></label>`}>
    <${Problem} error=${error}/>
    ${data && html`<${Facts} facts=${[
      ["Total", html`<strong id="total">${cents(data.total_cents, data.currency)}</strong>`],
      ["State", data.final ? "final" : `so far, up to ${time(data.until_ms / 1000)}`],
      ["Carried over", data.carried_out_millionths ? millionths(data.carried_out_millionths, data.currency) : ""],
    ]}/>
    <${Table} label=${title} rows=${data.lines.slice(0, MAX_LINES)} empty="Nothing in this month." columns=${[
      ["Job", (one) => (links ? html`<${JobLink} id=${one.job}/>` : one.job)],
      ["User", (one) => one.user],
      ["Site", (one) => one.cluster],
      ["What", (one) => [one.kind, one.phase].filter(Boolean).join(", ")],
      ["Of", (one) => one.resource],
      ["Hours", (one) => short(one.quantity, 4), "number"],
      ["Price", (one) => (one.price_millionths ? millionths(one.price_millionths, data.currency) : ""), "number"],
      ["Amount", (one) => cents(one.cents, data.currency), "number"],
    ]}/>
    ${data.lines.length > MAX_LINES && html`<p class="hint">The first ${MAX_LINES} of ${data.lines.length} lines.</p>`}
    <p class="hint">As CSV, FOCUS or JSON: <code>isthmus bill --${party} ${name} --month ${month} --format csv</code></p>`}
    ${party === "owner" && html`<${OwnerWaits} owner=${name} month=${month}/>`}
  </${Card}>`;
}
