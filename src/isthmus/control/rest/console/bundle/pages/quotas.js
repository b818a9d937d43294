// Projects, groups and users with limits: what each holds and has used of the month, and how much of it is left.

import { useData } from "../lib/live.js";
import { count, millionths, short } from "../lib/text.js";
import { Bar, Card, html, Problem, Table } from "../lib/ui.js";

export function Quotas() {
  const { data, error } = useData("/v1/quotas", 15000);
  const rows = data?.rows ?? [];
  const parents = new Map(rows.filter((one) => one.kind === "project").map((one) => [one.name, one.parent]));
  return html`<${Card} title="Projects and quotas">
    <${Problem} error=${error}/>
    <${Table} label="Projects and quotas" rows=${rows} rowKey=${(one) => `${one.kind}:${one.name}`}
      empty="No project, group or user has used chips or has limits." columns=${[
      ["Account", (one) => `${"\u2003".repeat(depth(one, parents))}${one.kind} ${one.name}`],
      ["Guaranteed", (one) => one.kind === "project" ? count(one.guaranteed_chips) : "", "number"],
      ["Chips now", (one) => used(count(one.num_chips), one.num_chips, one.max_chips, count, `chips of ${one.name}`), "number"],
      ["Chip-hours", (one) => used(short(one.chip_hours, 4), one.chip_hours, one.max_chip_hours, count, `chip-hours of ${one.name}`), "number"],
      ["Spend", (one) => used(money(one.spend_millionths, data), one.spend_millionths, one.max_spend_millionths,
        (limit) => money(limit, data), `spend of ${one.name}`), "number"],
      ["Jobs that wait", (one) => one.num_capped ? count(one.num_capped) : "", "number"],
    ]}/>
    ${data?.more && html`<p class="hint">More accounts: isthmus quota show.</p>`}
    <p class="hint">Amounts of ${data?.month ?? "this month"}. Set with isthmus quota set.</p>
  </${Card}>`;
}

const money = (amount, data) => millionths(amount, data?.currency ?? "");

function used(text, amount, limit, shown, label) {
  if (limit === null || limit === undefined) return text;
  return html`${text} of ${shown(limit)} <${Bar} fraction=${limit ? amount / limit : 1} label=${label}/>`;
}

function depth(row, parents) {
  let found = 0;
  for (let at = row.parent; at && parents.has(at) && found < 16; at = parents.get(at)) found += 1;
  return found;
}
