// The audit log: the newest records, of all or of one name, or those since a time, one page of the server at a time.

import { useData } from "../lib/live.js";
import { time } from "../lib/text.js";
import { Card, html, Problem, Table, useRef, useState } from "../lib/ui.js";

const SIZE = 100;

export function Audit() {
  const [filter, setFilter] = useState({ user: "", since: "" });
  const [after, setAfter] = useState(0);
  const form = useRef(null);
  const user = filter.user ? `&user=${encodeURIComponent(filter.user)}` : "";
  const since = filter.since ? `&since_s=${Date.parse(`${filter.since}:00Z`) / 1000}` : "";
  const cursor = after === "first" ? "&oldest=true" : after ? `&after=${after}` : "";
  const { data, error } = useData(`/v1/audit?limit=${SIZE}${user}${since}${cursor}`, after ? 0 : 10000);
  const apply = (event) => {
    event.preventDefault();
    const given = new FormData(form.current);
    setAfter(0);
    setFilter({ user: given.get("user"), since: given.get("since") });
  };
  const records = data?.records ?? [];
  const shown = after ? records : [...records].reverse();
  return html`<${Card} title="Audit log">
    <form class="row" ref=${form} onSubmit=${apply}>
      <label>Name <input name="user" maxlength="200"/></label>
      <label>Since (UTC) <input name="since" type="datetime-local"/></label>
      <button class="plain">Show</button>
    </form>
    <${Problem} error=${error}/>
    <${Table} label="Audit log" rows=${shown} rowKey=${(one) => one.number} empty="No record." columns=${[
      ["Number", (one) => String(one.number), "number"],
      ["Time", (one) => time(one.at_s)],
      ["Act", (one) => one.action],
      ["By", (one) => [one.role, one.actor].filter(Boolean).join(" ")],
      ["Token", (one) => one.token],
      ["From", (one) => one.address],
      ["On", (one) => one.subject],
      ["Detail", (one) => one.detail],
      ["Hash", (one) => one.hash.slice(0, 12)],
    ]}/>
    <div class="pager">
      <button type="button" class="plain" onClick=${() => setAfter(0)} disabled=${!after}>Newest</button>
      <button type="button" class="plain" disabled=${!after || records.length < SIZE} onClick=${() => setAfter(data.next)}>Later</button>
      <button type="button" class="plain" disabled=${!records.length || records[0].number <= 1}
        onClick=${() => setAfter(records[0].number <= SIZE + 1 ? "first" : records[0].number - SIZE - 1)}>Earlier</button>
    </div>
  </${Card}>`;
}
