// Projects, groups and users with limits: what each holds and has used of the month, and how much of it is left.
// Below an account are the clusters and node groups at which it has guaranteed or limited chips. An owner sees its projects.

import { post } from "../lib/api.js";
import { useAction, useData } from "../lib/live.js";
import { count, millionths, short } from "../lib/text.js";
import { Bar, Card, html, Problem, Table, useRef, useState } from "../lib/ui.js";

export function Quotas({ role = "admin" }) {
  const { data, error, reload } = useData("/v1/quotas", 15000);
  const accounts = data?.rows ?? [];
  const parents = new Map(accounts.filter((one) => one.kind === "project").map((one) => [one.name, one.parent]));
  const rows = accounts.flatMap((one) => [one, ...one.places.map((place) => ({ ...place, at: one }))]);
  if (role === "owner" && !accounts.length) return null;
  return html`<${Card} title="Projects and quotas">
    <${Problem} error=${error}/>
    <${Table} label="Projects and quotas" rows=${rows} rowKey=${(one) => one.at ? `${one.at.kind}:${one.at.name} ${placeName(one)}` : `${one.kind}:${one.name}`}
      empty="No project, group or user has used chips or has limits." columns=${[
      ["Account", (one) => one.at
        ? `${"\u2003".repeat(depth(one.at, parents) + 1)}at ${placeName(one)}`
        : `${"\u2003".repeat(depth(one, parents))}${one.kind} ${one.name}`],
      ["Guaranteed", (one) => (one.at ?? one).kind === "project" ? count(one.guaranteed_chips) : "", "number"],
      ["Chips now", (one) => used(count(one.num_chips), one.num_chips, one.max_chips, count,
        one.at ? `chips of ${one.at.name} at ${placeName(one)}` : `chips of ${one.name}`), "number"],
      ["Chip-hours", (one) => one.at ? "" : used(short(one.chip_hours, 4), one.chip_hours, one.max_chip_hours, count, `chip-hours of ${one.name}`), "number"],
      ["Spend", (one) => one.at ? "" : used(money(one.spend_millionths, data), one.spend_millionths, one.max_spend_millionths,
        (limit) => money(limit, data), `spend of ${one.name}`), "number"],
      ["Jobs that wait", (one) => one.num_capped ? count(one.num_capped) : "", "number"],
    ]}/>
    ${data?.more && html`<p class="hint">More accounts: isthmus quota show.</p>`}
    <p class="hint">Amounts of ${data?.month ?? "this month"}. The operator makes projects and groups with isthmus quota set.</p>
    <${SetLimits} rows=${accounts} role=${role} done=${reload}/>
  </${Card}>`;
}

// Set the limits of an account, in place of all that it has: an empty field is no limit.
function SetLimits({ rows, role, done }) {
  const form = useRef(null);
  const { busy, error, run } = useAction();
  const [said, say] = useState("");
  const set = (event) => {
    event.preventDefault();
    const given = new FormData(form.current);
    const account = given.get("account").trim();
    const limits = { chips_at: placed(given.get("chips_at")) };
    if (given.get("guaranteed_at")) limits.guaranteed_at = placed(given.get("guaranteed_at"));
    for (const name of ["chips", "chip_hours_per_month"]) if (given.get(name)) limits[name] = Number(given.get(name));
    if (given.get("spend_per_month")) limits.spend_per_month = given.get("spend_per_month");
    say("");
    run(async () => {
      await post(`/v1/quotas/${encodeURIComponent(account)}`, limits);
      say(`The limits of ${account} are set.`);
      done();
    });
  };
  return html`<h3>Set limits</h3>
    <form class="row" ref=${form} onSubmit=${set}>
      <label>Account <input name="account" required maxlength="80" list="accounts" placeholder="user:NAME" pattern="(user|group|project):.+"/></label>
      <datalist id="accounts">${rows.map((one) => html`<option key=${`${one.kind}:${one.name}`} value=${`${one.kind}:${one.name}`}/>`)}</datalist>
      ${role === "admin" && html`
        <label>Chips at once <input name="chips" type="number" min="0"/></label>
        <label>Chip-hours a month <input name="chip_hours_per_month" type="number" min="0"/></label>
        <label>Spend a month <input name="spend_per_month" inputmode="decimal" pattern="[0-9]+([.][0-9]{1,6})?" size="10"/></label>`}
      <label>Chips at clusters <input name="chips_at" pattern=${PLACED} placeholder="east/h20=8, west=4" size="18"/></label>
      <label>Guaranteed there <input name="guaranteed_at" pattern=${PLACED} placeholder="as before" size="18"/></label>
      <button disabled=${busy}>Set limits</button>
    </form>
    ${said && html`<p class="done" role="status">${said}</p>`}
    <${Problem} error=${error}/>
    <p class="hint">${role === "admin"
      ? "They replace the account's limits; an empty field is no limit."
      : "They replace the limits at your clusters; an empty field is no limit. Other limits are the operator's."}</p>`;
}

const PLACED = "\\s*[^=,\\s]+=[0-9]+(\\s*,\\s*[^=,\\s]+=[0-9]+)*\\s*";

// "east/h20=8, west=4" as lines of a quota.
const placed = (text) => text.split(",").map((one) => one.trim()).filter(Boolean).map((one) => {
  const [, cluster, group, chips] = /^([^/=]+)(?:[/]([^=]+))?=(.*)$/.exec(one) ?? [];
  return { cluster, node_group: group ?? null, chips: Number(chips) };
});

const placeName = (one) => one.node_group ? `${one.cluster}/${one.node_group}` : one.cluster;

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
