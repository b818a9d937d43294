// The operator's page: projects and quotas, limits and who uses them, sites, tokens, invitations, the check of the ledger, and the audit log.

import { get, post } from "../lib/api.js";
import { useAction, useData } from "../lib/live.js";
import { bytes, count, millionths, short, time } from "../lib/text.js";
import { Card, Facts, html, Problem, Table, useRef, useState } from "../lib/ui.js";
import { Audit } from "./audit.js";
import { Quotas } from "./quotas.js";
import { SiteActions } from "./site_actions.js";
import { TokenList } from "./tokens.js";

export function OperatorPage({ session }) {
  const pool = useData("/v1/pool", 5000);
  return html`
    <h1 tabindex="-1">Operator</h1>
    <p class="lead">Limits, sites, tokens, ledger and audit log of the pool.</p>
    <${Quotas}/>
    <${Limits}/>
    <${SiteActions} clusters=${pool.data?.clusters ?? []} error=${pool.error} changed=${pool.reload} role="admin"/>
    <${TokenList} session=${session}/>
    <${Invitations}/>
    <div class="grid"><${Usage}/><${Ledger}/></div>
    <${Audit}/>`;
}

const LIMITS = {
  live_jobs_per_user: ["Jobs of a user that have not ended", count],
  stored_bytes_per_user: ["Bytes of a user's jobs", bytes],
  clusters_per_owner: ["Clusters of an owner", count],
  job_bytes: ["Bytes of a job", bytes],
  output_bytes_per_job: ["Metrics and output of a job", bytes],
  versions_per_user: ["Catalogue versions of a user", count],
  version_files_per_user: ["Files in them", count],
};

function Limits() {
  const { data, error } = useData("/v1/limits", 15000);
  const most = data?.limits.live_jobs_per_user ?? 1;
  return html`<${Card} title="Limits">
    <${Problem} error=${error}/>
    ${data && html`<${Facts} facts=${[
      ...Object.entries(data.limits).map(([name, value]) => [LIMITS[name]?.[0] ?? name, (LIMITS[name]?.[1] ?? count)(value)]),
      ["Users with priority high", data.high_priority_users.join(", ") || "by token"],
    ]}/>
    <h3>Who uses most</h3>
    <${Table} label="Who uses most" rows=${data.users} rowKey=${(one) => one.user} empty="No user has a job." columns=${[
      ["User", (one) => one.user],
      ["Jobs that have not ended", (one) => `${count(one.live_jobs)} of ${count(most)}`, "number"],
      ["Bytes of its jobs", (one) => bytes(one.stored_bytes), "number"],
    ]}/>`}
    <p class="hint">Set with isthmus serve, for example --max-jobs-per-user; isthmus serve --help lists them.</p>
  </${Card}>`;
}

function Usage() {
  const { data } = useData("/v1/usage", 15000);
  const rows = Object.entries(data?.given ?? {});
  return html`<${Card} title="Chip-hours by owner"><${Table} label="Chip-hours by owner" rows=${rows} columns=${[
    ["Owner", ([name]) => name],
    ["Given", ([, hours]) => short(hours, 4), "number"],
  ]}/></${Card}>`;
}

function Ledger() {
  const { busy, error, run } = useAction();
  const [found, setFound] = useState(null);
  return html`<${Card} title="Ledger">
    <p class="lead">Recount every entry from its price and time: the sum of all is 0.</p>
    <div class="row"><button type="button" disabled=${busy} onClick=${() => run(async () => setFound(await get("/v1/ledger/check")))}>Check the ledger</button></div>
    <${Problem} error=${error}/>
    ${found && html`<div role="status"><${Facts} facts=${[
      ["Entries", count(found.entries)], ["Sum", millionths(found.sum, "")], ["Unpaired", String(found.unpaired)],
      ["Differences", found.differences.join("; ") || "none"],
    ]}/></div>`}
  </${Card}>`;
}

function Invitations() {
  const { data, error, reload } = useData("/v1/invitations", 15000);
  const form = useRef(null);
  const action = useAction();
  const [made, setMade] = useState(null);
  const invite = (event) => {
    event.preventDefault();
    const given = new FormData(form.current);
    action.run(async () => {
      setMade(await post("/v1/invitations", { owner: given.get("owner"), cluster: given.get("cluster") || null }));
      reload();
    });
  };
  return html`<${Card} title="Invitations">
    <form class="row" ref=${form} onSubmit=${invite}>
      <label>Owner <input name="owner" required maxlength="63"/></label>
      <label>Cluster (empty: any) <input name="cluster" maxlength="63"/></label>
      <button disabled=${action.busy}>Invite</button>
    </form>
    <${Problem} error=${error}/><${Problem} error=${action.error}/>
    ${made && html`<div class="done" role="status"><p>The code for owner ${made.owner}, shown this once, for an hour:</p>
      <p class="mono secret">${made.code}</p>
      <button type="button" class="plain" onClick=${() => setMade(null)}>Hide it</button></div>`}
    <${Table} label="Invitations" rows=${(data ?? []).slice(-50).reverse()} rowKey=${(one) => one.id} empty="None." columns=${[
      ["Owner", (one) => one.owner], ["Cluster", (one) => one.joined || one.cluster || "any"],
      ["State", (one) => one.state], ["By", (one) => one.by], ["Ends", (one) => time(one.expires_s)],
    ]}/>
  </${Card}>`;
}
