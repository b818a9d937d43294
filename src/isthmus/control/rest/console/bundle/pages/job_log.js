// The end of the workers' output, of all ranks or of one.

import { get } from "../lib/api.js";
import { Card, html, useEffect, useRef, useState } from "../lib/ui.js";

const MAX_CHARS = 40000;

export function JobLog({ path, version }) {
  const [rank, setRank] = useState("");
  const [text, setText] = useState("");
  const state = useRef({ next: 0, busy: false, rank: "" });
  useEffect(() => {
    const one = state.current;
    if (one.rank !== rank) [one.rank, one.next] = [rank, 0];
    if (one.busy) return;
    one.busy = true;
    const load = async () => {
      const wanted = one.rank;
      const filter = wanted === "" ? "" : `&rank=${wanted}`;
      const page = await get(`${path}/logs?after=${one.next}&limit=500${filter}`);
      if (one.rank !== wanted) return load();
      const fresh = page.chunks.map((chunk) => (wanted === "" ? prefixed(chunk) : chunk.text)).join("");
      setText((old) => ((one.next ? old : "") + fresh).slice(-MAX_CHARS));
      one.next = page.next;
      return page.chunks.length === 500 ? load() : undefined;
    };
    load().catch(() => {}).finally(() => (one.busy = false));
  }, [path, version, rank]);
  return html`<${Card} title="Output" aside=${html`<label>Rank <input type="number" min="0" value=${rank}
      onChange=${(event) => (setText(""), setRank(event.target.value))}/></label>`}>
    ${text ? html`<pre tabindex="0" aria-label="Output of the workers">${text}</pre>` : html`<p class="none">No output yet.</p>`}
  </${Card}>`;
}

function prefixed(chunk) {
  const who = `${chunk.cluster ?? "?"}/${chunk.rank}| `;
  return `${chunk.text.replace(/\n$/, "").split("\n").map((line) => who + line).join("\n")}\n`;
}
