// What a page shows and keeps up to date: data of the REST interface, the event stream, and the state of the connection.

import { get } from "./api.js";
import { follow } from "./stream.js";
import { useCallback, useEffect, useRef, useState } from "./ui.js";

const REFRESH_MS = 700;
const connection = { state: "live", at: 0 };
const watchers = new Set();

function setConnection(state) {
  if (state === "none") return;
  if (state === "live" && connection.state === "again") return;
  if (state === connection.state) return;
  connection.state = state;
  connection.at = Date.now() / 1000;
  for (const watcher of watchers) watcher({ ...connection });
}

// Return the state of the connection: "live", "lost" or "again", and since when.
export function useConnection() {
  const [found, set] = useState({ ...connection });
  useEffect(() => {
    watchers.add(set);
    return () => watchers.delete(set);
  }, []);
  return found;
}

// Note whether a request reached the server; what it refuses is an answer.
function noted(error) {
  if (error instanceof TypeError) setConnection("lost");
  else if (connection.state === "lost") setConnection("again");
}

// Return {data, error, reload}: the answer to a GET of `path` (null: none), again every `every_ms` if given, and after
// the connection has come back. An answer that comes late, for another path, is dropped.
export function useData(path, every_ms = 0) {
  const [found, set] = useState({ path: null, data: null, error: null });
  const wanted = useRef(path);
  wanted.current = path;
  const reload = useCallback(async () => {
    if (path === null) return;
    try {
      const data = await get(path);
      noted(null);
      if (wanted.current === path) set({ path, data, error: null });
    } catch (error) {
      noted(error);
      if (wanted.current === path) set((old) => ({ path, data: old.path === path ? old.data : null, error }));
    }
  }, [path]);
  useEffect(() => {
    reload();
    const again = (state) => state.state === "again" && reload();
    watchers.add(again);
    const timer = every_ms ? setInterval(reload, every_ms) : 0;
    return () => {
      watchers.delete(again);
      clearInterval(timer);
    };
  }, [reload, every_ms]);
  const current = found.path === path ? found : { data: null, error: null };
  return { ...current, error: current.error instanceof TypeError ? null : current.error, reload };
}

// Follow the event stream of all visible jobs, or of one; `handle(kind, data)` may change with each rendering.
export function useEvents(handle, job = null, enabled = true) {
  const latest = useRef(handle);
  latest.current = handle;
  useEffect(() => {
    if (!enabled) return undefined;
    const path = job === null ? "/v1/events" : `/v1/events?job=${encodeURIComponent(job)}`;
    return follow(path, (kind, data) => latest.current(kind, data), setConnection);
  }, [job, enabled]);
}

// Return a function that calls `act` soon, however often it is called: at once, then every REFRESH_MS at most.
export function useThrottled(act) {
  const state = useRef({ timer: 0, last: 0, act });
  state.current.act = act;
  useEffect(() => () => clearTimeout(state.current.timer), []);
  return useCallback(() => {
    const one = state.current;
    if (one.timer) return;
    const wait = Math.max(0, one.last + REFRESH_MS - Date.now());
    one.timer = setTimeout(() => {
      one.timer = 0;
      one.last = Date.now();
      one.act();
    }, wait);
  }, []);
}

// Return {busy, error, run}: `run(act)` awaits a request of the user and keeps its error to show.
export function useAction() {
  const [found, set] = useState({ busy: false, error: null });
  const run = async (act) => {
    set({ busy: true, error: null });
    try {
      const result = await act();
      set({ busy: false, error: null });
      return result;
    } catch (error) {
      const gone = error instanceof TypeError;
      set({ busy: false, error: gone ? { message: "no server answers", hint: "nothing was changed; try again" } : error });
      return undefined;
    }
  };
  return { ...found, run };
}
