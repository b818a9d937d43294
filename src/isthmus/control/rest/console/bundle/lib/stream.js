// The event stream (server-sent events), read with fetch, since it needs the session's header. It connects again after
// a loss, goes on after the last event it had, and says in which state it is: "live", "lost" or "again". Browsers have six
// connections to a server for all tabs, and keep those of pages that were left: a page that is not shown holds no stream.

import { endHere, sessionHeaders } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 3000];
let left = false; // for another page, which may come back to this one
addEventListener("pagehide", () => (left = true));
addEventListener("pageshow", () => (left = false));
const SILENT_MS = 40000; // the server sends a comment every 15 s

// Follow `path`; `handle(kind, data)` gets each event, `state(word)` each change. Return a function that ends it.
export function follow(path, handle, state) {
  const ended = new AbortController();
  run(path, handle, state, ended.signal);
  return () => ended.abort();
}

async function run(path, handle, state, ended) {
  let last = null;
  let failures = 0;
  while (!ended.aborted) {
    await shown();
    if (ended.aborted) return;
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    let hidden = false;
    const hide = (event) => {
      if (event.type === "pagehide" || document.visibilityState === "hidden") (hidden = true, stop());
    };
    ended.addEventListener("abort", stop);
    addEventListener("pagehide", hide);
    document.addEventListener("visibilitychange", hide);
    try {
      const headers = { ...sessionHeaders(), Accept: "text/event-stream" };
      if (last !== null) headers["Last-Event-ID"] = last;
      const answer = await fetch(path, { headers, cache: "no-store", signal: attempt.signal });
      if (answer.status === 401) return endHere();
      if (answer.status === 403 || answer.status === 404) return state("none");
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      state(failures ? "again" : "live");
      failures = 0;
      await read(answer.body, attempt, (event) => {
        if (event.id !== null) last = event.id;
        handle(event.kind, event.data);
      });
      throw new Error("the stream has ended");
    } catch {
      if (ended.aborted) return;
      if (hidden) continue;
      if (failures === 0) state("lost");
      await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
      failures += 1;
    } finally {
      ended.removeEventListener("abort", stop);
      removeEventListener("pagehide", hide);
      document.removeEventListener("visibilitychange", hide);
    }
  }
}

// Wait until the page is shown.
function shown() {
  if (document.visibilityState !== "hidden" && !left) return Promise.resolve();
  return new Promise((done) => {
    const look = () => {
      if (document.visibilityState === "hidden" || left) return;
      document.removeEventListener("visibilitychange", look);
      removeEventListener("pageshow", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
    addEventListener("pageshow", look);
  });
}

// Parse a stream (WHATWG HTML standard, 9.2.6) until it ends or says nothing for SILENT_MS.
async function read(body, attempt, emit) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let timer = setTimeout(() => attempt.abort(), SILENT_MS);
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => attempt.abort(), SILENT_MS);
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = parse(text.slice(0, end));
        text = text.slice(end + 2);
        if (event) emit(event);
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

function parse(block) {
  const event = { kind: "message", id: null, data: "" };
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at <= 0) continue;
    const value = line.slice(at + 1).replace(/^ /, "");
    if (line.startsWith("event:")) event.kind = value;
    else if (line.startsWith("id:")) event.id = value;
    else if (line.startsWith("data:")) event.data += value;
  }
  if (!event.data) return null;
  return { ...event, data: JSON.parse(event.data) };
}
