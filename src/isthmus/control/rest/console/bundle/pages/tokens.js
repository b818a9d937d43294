// Tokens and sessions that the caller may see; an operator creates tokens, each shown once.

import { post } from "../lib/api.js";
import { useAction, useData } from "../lib/live.js";
import { time } from "../lib/text.js";
import { Card, html, Problem, Table, useRef, useState } from "../lib/ui.js";

const SIZE = 100;
const DAY_S = 86400;

export function TokenList({ session }) {
  const { data, error, reload } = useData("/v1/tokens", 15000);
  const [ended, showEnded] = useState(false);
  const action = useAction();
  const rows = (data ?? []).filter((one) => ended || one.state === "valid").reverse();
  const revoke = (one) => action.run(() => post(`/v1/tokens/${encodeURIComponent(one.id)}/revoke`)).then(reload);
  return html`<${Card} title="Tokens" aside=${html`<label><input type="checkbox" checked=${ended}
      onChange=${(event) => showEnded(event.target.checked)}/> also ended ones</label>`}>
    <${Problem} error=${error}/><${Problem} error=${action.error}/>
    ${session.role === "admin" && html`<${NewToken} done=${reload}/>`}
    <${Table} label="Tokens" rows=${rows.slice(0, SIZE)} rowKey=${(one) => one.id} columns=${[
      ["Id", (one) => html`<span class="mono">${one.id}</span>`],
      ["Role", (one) => one.role],
      ["Name", (one) => one.name],
      ["Kind", (one) => (one.session_of ? `session of ${one.session_of}` : one.site ? `agent of ${one.site}` : "token")],
      ["State", (one) => one.state],
      ["Made", (one) => `${time(one.created_s)}${one.created_by ? ` by ${one.created_by}` : ""}`],
      ["Ends", (one) => (one.expires_s === null ? "never" : time(one.expires_s))],
      ["Actions", (one) => one.state === "valid" && html`<button type="button" class="danger" disabled=${action.busy}
        aria-label=${`Revoke ${one.id}`} onClick=${() => revoke(one)}>Revoke</button>`],
    ]}/>
    ${rows.length > SIZE && html`<p class="hint">The newest ${SIZE} of ${rows.length}; isthmus token list has all.</p>`}
  </${Card}>`;
}

function NewToken({ done }) {
  const form = useRef(null);
  const { busy, error, run } = useAction();
  const [made, setMade] = useState(null);
  const create = (event) => {
    event.preventDefault();
    const given = new FormData(form.current);
    const days = Number(given.get("days"));
    const request = { role: given.get("role"), name: given.get("name"), expires_in_s: days ? days * DAY_S : null };
    run(async () => {
      setMade(await post("/v1/tokens", request));
      form.current.reset();
      done();
    });
  };
  return html`<form class="row" ref=${form} onSubmit=${create}>
      <label>Role <select name="role"><option>user</option><option>owner</option><option>admin</option></select></label>
      <label>Name <input name="name" required maxlength="63"/></label>
      <label>Days (empty: no end) <input name="days" type="number" min="1" max="3650"/></label>
      <button disabled=${busy}>Create a token</button>
    </form>
    <${Problem} error=${error}/>
    ${made && html`<div class="done" role="status"><p>The token of ${made.role} ${made.name}, shown this once:</p>
      <p class="mono secret">${made.token}</p>
      <button type="button" class="plain" onClick=${() => setMade(null)}>Hide it</button></div>`}`;
}
