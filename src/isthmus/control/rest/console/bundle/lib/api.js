// Requests to the REST interface. A session is half a cookie, which no script sees, and half this key, which no other
// origin sees: it is in this origin's storage, so that all tabs of the console share the session.

const KEY = "isthmus-session-key";
const listeners = new Set();
let session = null;

export class ApiError extends Error {
  constructor(status, body) {
    super(body.message ?? `the server answered ${status}`);
    this.status = status;
    this.hint = body.hint ?? "";
  }
}

// Call `listener` with the session, or null, whenever it begins or ends.
export function onSession(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function setSession(found) {
  if (found === null && session === null) return;
  session = found;
  for (const listener of listeners) listener(found);
}

export function sessionHeaders() {
  return { "Isthmus-Session-Key": localStorage.getItem(KEY) ?? "" };
}

// Send a request of the session; return [body, headers]. Raises ApiError, or TypeError if no server answers.
export async function request(method, path, body, headers = sessionHeaders()) {
  const options = { method, headers, credentials: "same-origin", cache: "no-store", redirect: "error" };
  if (body !== undefined) {
    options.headers = { ...headers, "Content-Type": "application/json" };
    options.body = JSON.stringify(body);
  }
  const answer = await fetch(path, options);
  const text = await answer.text();
  let found = null;
  try {
    found = text ? JSON.parse(text) : null;
  } catch {
    found = { message: text.slice(0, 200) };
  }
  if (answer.status === 401) endHere();
  if (!answer.ok) throw new ApiError(answer.status, found ?? {});
  return [found, answer.headers];
}

export const get = async (path) => (await request("GET", path))[0];
export const post = async (path, body) => (await request("POST", path, body))[0];
export const remove = async (path) => (await request("DELETE", path))[0];

// Return the session that this browser has, null without one.
export async function findSession() {
  if (!localStorage.getItem(KEY)) return null;
  try {
    setSession(await get("/v1/session"));
  } catch (error) {
    if (error.status !== 401) throw error;
  }
  return session;
}

export async function signIn(token) {
  const [found] = await request("POST", "/v1/session", undefined, { Authorization: `Bearer ${token}` });
  localStorage.setItem(KEY, found.key);
  setSession({ ...found, key: "" });
}

// Open the page of the provider where persons sign in.
export async function beginSignIn() {
  const [found] = await request("POST", "/v1/oidc/begin", {}, {});
  location.assign(found.url);
}

// Take what the provider has sent back in the address; the address then forgets it. Returns whether there was an answer.
export function takeAnswer() {
  const given = new URLSearchParams(location.search);
  if (given.size) history.replaceState(null, "", location.pathname + location.hash);
  const refused = given.get("error");
  if (refused) return { refused };
  return given.has("code") && given.has("state") ? { code: given.get("code"), state: given.get("state") } : null;
}

export async function finishSignIn(answer) {
  const [found] = await request("POST", "/v1/oidc/session", answer, {});
  localStorage.setItem(KEY, found.key);
  setSession({ ...found, key: "" });
}

export async function signOut() {
  try {
    await remove("/v1/session");
  } finally {
    endHere();
  }
}

// Forget the session here: it has ended at the server, or in another tab.
export function endHere() {
  localStorage.removeItem(KEY);
  setSession(null);
}

addEventListener("storage", (event) => {
  if (event.key === KEY && event.newValue === null) setSession(null);
});
