// An owner's page: income, users at its sites, its sites and their policy, tariff, tokens.

import { post } from "../lib/api.js";
import { Statement } from "../lib/statement.js";
import { useAction, useData } from "../lib/live.js";
import { short } from "../lib/text.js";
import { Card, html, Problem, Table, useRef, useState } from "../lib/ui.js";
import { PriceList } from "./price_list.js";
import { Quotas } from "./quotas.js";
import { SiteActions } from "./site_actions.js";
import { TokenList } from "./tokens.js";

export function OwnerPage({ session }) {
  const pool = useData("/v1/pool", 5000);
  const usage = useData("/v1/usage", 15000);
  const [version, setVersion] = useState(0);
  const clusters = pool.data?.clusters ?? [];
  return html`
    <h1 tabindex="-1">Owner ${session.name}</h1>
    <p class="lead">What your sites earn, for which users, and on which terms.</p>
    <${Statement} party="owner" name=${session.name} title="Income"/>
    <${Quotas} role="owner"/>
    <${Card} title="Users at your sites"><${Table} label="Users at your sites" rows=${usage.data?.rows ?? []} columns=${[
      ["User", (one) => one.user],
      ["Site", (one) => one.cluster],
      ["Chip-hours", (one) => short(one.chip_hours, 4), "number"],
      ["Chips now", (one) => String(one.num_chips), "number"],
    ]} empty="No job of the pool has run at your sites."/></${Card}>
    <${SiteActions} clusters=${clusters} error=${pool.error} changed=${pool.reload} role="owner"/>
    <${Card} title="Policy">
      <${Table} label="Policy" rows=${clusters} empty="None of your sites has joined." columns=${[
        ["Site", (one) => one.cluster.name],
        ["Region", (one) => one.cluster.region],
        ["Priority of the pool here", (one) => Object.entries(one.cluster.priorities).map(([pool, local]) => `${pool}: ${local}`).join(", ")],
        ["New parts", (one) => one.duty.state],
        ["Probation", (one) => (one.duty.probation ? `${one.duty.probation.num_succeeded} of ${one.duty.probation.num_needed} jobs` : "no")],
      ]}/>
      <p class="hint">Limits for pool jobs are in policy.yaml, which stays at the site: its agent rejects every order against it.</p>
    </${Card}>
    <${PriceList} version=${version}/>
    <${Publish} clusters=${clusters} done=${() => setVersion(version + 1)}/>
    <${TokenList} session=${session}/>`;
}

// Publish a price of one node group.
function Publish({ clusters, done }) {
  const form = useRef(null);
  const { busy, error, run } = useAction();
  const [said, say] = useState("");
  const groups = clusters.flatMap((one) => one.cluster.node_groups.map((group) => [one.cluster.name, group.name]));
  const publish = (event) => {
    event.preventDefault();
    const given = new FormData(form.current);
    const [cluster, node_group] = JSON.parse(given.get("group"));
    const price = { cluster, node_group, per_chip_hour: given.get("price") };
    if (given.get("from")) price.from = given.get("from");
    run(async () => {
      const view = await post("/v1/tariffs", { currency: given.get("currency").toUpperCase(), prices: [price] });
      say(`Published in ${view.currency}.`);
      done();
    });
  };
  if (!groups.length) return null;
  return html`<${Card} title="Publish a price"><form class="row" ref=${form} onSubmit=${publish}>
      <label>Chip <select name="group">${groups.map((one) => html`<option key=${one.join("/")} value=${JSON.stringify(one)}>${one.join("/")}</option>`)}</select></label>
      <label>Price of a chip-hour <input name="price" required inputmode="decimal" pattern="[0-9]+([.][0-9]{1,6})?" size="10"/></label>
      <label>Currency <input name="currency" required pattern="[A-Za-z]{3}" size="4"/></label>
      <label>From (UTC, empty: now) <input name="from" type="datetime-local"/></label>
      <button disabled=${busy}>Publish</button>
    </form>
    ${said && html`<p class="done" role="status">${said}</p>`}
    <${Problem} error=${error}/>
    <p class="hint">Published prices never change; a later one replaces them from its first moment on. Classes, hours of the
      day, storage: <code>isthmus tariff set tariff.yaml</code></p>
  </${Card}>`;
}
