// Sites with what may be done to them: cordon, uncordon, drain; an operator also ends a probation or declares one gone.

import { post } from "../lib/api.js";
import { useAction } from "../lib/live.js";
import { count, time } from "../lib/text.js";
import { Card, html, Problem, Table, useState } from "../lib/ui.js";
import { dutyOf } from "./pool.js";

const SIZE = 100;

export function SiteActions({ clusters, error, changed, role }) {
  const action = useAction();
  const [asked, ask] = useState("");
  const act = (site, what, body) => action.run(() => post(`/v1/sites/${encodeURIComponent(site)}/${what}`, body)).then(changed);
  const button = (site, what, label, body) => html`<button type="button" class="plain" key=${what} disabled=${action.busy}
    aria-label=${`${label} ${site}`} onClick=${() => act(site, what, body)}>${label}</button>`;
  const confirmed = (site, what, label, body, question) => {
    const name = `${what} ${site}`;
    if (asked !== name) {
      return html`<button type="button" class="danger" key=${what} aria-label=${`${label} ${site}`} onClick=${() => ask(name)}>${label}</button>`;
    }
    return html`<span key=${what}>${question} <button type="button" class="danger" disabled=${action.busy}
      onClick=${() => act(site, what, body).then(() => ask(""))}>Yes</button>
      <button type="button" class="plain" onClick=${() => ask("")}>No</button></span>`;
  };
  const actions = ({ cluster: { name }, duty, connected }) => html`<div class="row">
    ${duty.state === "open" ? button(name, "cordon", "Cordon") : button(name, "uncordon", "Uncordon")}
    ${["open", "cordoned"].includes(duty.state) && confirmed(name, "drain", "Drain", {}, "Move its jobs away?")}
    ${role === "admin" && duty.probation && button(name, "accept", "End probation")}
    ${role === "admin" && !connected && confirmed(name, "gone", "Declare gone", undefined, "Its agent is never admitted again.")}
  </div>`;
  return html`<${Card} title="Sites">
    <${Problem} error=${error}/><${Problem} error=${action.error}/>
    <${Table} label="Sites" rows=${clusters.slice(0, SIZE)} rowKey=${(one) => one.cluster.name} empty="No site." columns=${[
      ["Site", (one) => one.cluster.name],
      ["Owner", (one) => one.cluster.owner],
      ["State", dutyOf],
      ["Closed by", (one) => (one.duty.by ? `${one.duty.by}, ${time(one.duty.since_s)}` : "")],
      ["Jobs there", (one) => count(one.jobs.length), "number"],
      ["Last report", (one) => time(one.last_report_s)],
      ["Actions", actions],
    ]}/>
    ${clusters.length > SIZE && html`<p class="hint">The first ${SIZE} of ${count(clusters.length)} sites; isthmus site acts on any.</p>`}
  </${Card}>`;
}
