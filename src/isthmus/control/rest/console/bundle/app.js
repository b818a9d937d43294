// The console: sign-in, navigation by role, the page of the address, and the state of the connection.

import { findSession, onSession, signOut } from "./lib/api.js";
import { useConnection } from "./lib/live.js";
import { time } from "./lib/text.js";
import { html, render, useEffect, useRef, useState } from "./lib/ui.js";
import { BillPage } from "./pages/bill.js";
import { JobPage } from "./pages/job.js";
import { JobsPage } from "./pages/jobs.js";
import { OperatorPage } from "./pages/operator.js";
import { OwnerPage } from "./pages/owner.js";
import { PoolPage } from "./pages/pool.js";
import { QueuePage } from "./pages/queue.js";
import { SignInPage } from "./pages/sign_in.js";
import { SubmitPage } from "./pages/submit.js";

// Path, title, page, the roles that see it, whether the navigation lists it.
const PAGES = [
  ["pool", "Pool", PoolPage, ["user", "owner", "admin"], true],
  ["queue", "Queue", QueuePage, ["user", "admin"], true],
  ["jobs", "Jobs", JobsPage, ["user", "admin"], true],
  ["job", "Job", JobPage, ["user", "admin"], false],
  ["submit", "Submit", SubmitPage, ["user", "admin"], true],
  ["bill", "Bill", BillPage, ["user"], true],
  ["owner", "Owner", OwnerPage, ["owner"], true],
  ["operator", "Operator", OperatorPage, ["admin"], true],
];

function useAddress() {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").map(decode);
  const [found, set] = useState(read);
  useEffect(() => {
    const changed = () => set(read());
    addEventListener("hashchange", changed);
    changed(); // the address may have changed between the first rendering and this
    return () => removeEventListener("hashchange", changed);
  }, []);
  return found;
}

function decode(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return "";
  }
}

// Sign out; the next session begins with the first page, whatever its role.
async function leave() {
  await signOut().catch(() => {});
  location.hash = "#/pool";
}

function Connection() {
  const { state, at } = useConnection();
  const said = {
    live: "",
    lost: `No connection to the server since ${time(at)}. Trying again; what you see is from before.`,
    again: `Connected to the server again at ${time(at)}. The page shows the present state.`,
  };
  return html`<p id="connection" class=${`connection ${state}`} role="status">${said[state]}</p>`;
}

function Shell({ session }) {
  const [name, ...rest] = useAddress();
  const main = useRef(null);
  const first = useRef(true);
  const pages = PAGES.filter(([, , , roles]) => roles.includes(session.role));
  const found = pages.find(([path]) => path === (name || "pool"));
  const [path, title, Page] = found ?? [name, "Not found", NotFound];
  useEffect(() => {
    document.title = `${title} - Isthmus`;
    if (first.current) first.current = false;
    else main.current.querySelector("h1")?.focus();
  }, [path, rest.join("/")]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), main.current.focus())}>To the content</a>
    <header class="bar">
      <span class="logo">Isthmus</span>
      <nav aria-label="Pages"><ul>${pages.filter(([, , , , listed]) => listed).map(([to, label]) => html`
        <li key=${to}><a href=${`#/${to}`} aria-current=${to === path ? "page" : undefined}>${label}</a></li>`)}</ul></nav>
      <span class="who">${session.role} ${session.name}</span>
      <button type="button" class="plain" onClick=${leave}>Sign out</button>
    </header>
    <${Connection}/>
    <main id="main" tabindex="-1" ref=${main}><${Page} session=${session} args=${rest} key=${path + rest.join("/")}/></main>`;
}

function NotFound() {
  return html`<h1 tabindex="-1">Not found</h1><p>There is no such page. <a href="#/pool">To the pool</a></p>`;
}

function App() {
  const [session, setSession] = useState(undefined);
  const [ended, setEnded] = useState(false);
  useEffect(() => {
    const stop = onSession((found) => {
      setEnded(found === null);
      setSession(found);
    });
    const find = () => findSession().then((found) => setSession(found), () => setTimeout(find, 1000));
    find();
    return stop;
  }, []);
  if (session === undefined) return html`<p class="wait" role="status">Waiting for the server</p>`;
  if (session === null) return html`<${SignInPage} ended=${ended}/>`;
  return html`<${Shell} session=${session}/>`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App}/>`, root);
