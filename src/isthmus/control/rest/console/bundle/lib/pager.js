// The pages of a list that the server cuts: first, previous, next, last, and any position.

import { count } from "./text.js";
import { html, useRef } from "./ui.js";

// `start` is the index of the first row shown, `length` the number of rows in all, `size` that of a page.
export function Pager({ start, length, size, go, label }) {
  const field = useRef(null);
  const last = Math.max(0, Math.floor((length - 1) / size) * size);
  const to = (index) => go(Math.min(last, Math.max(0, index)));
  const jump = (event) => {
    event.preventDefault();
    const wanted = Number.parseInt(field.current.value, 10);
    if (wanted >= 1) to(wanted - 1);
  };
  if (length <= size && start === 0) return null;
  return html`<nav class="pager" aria-label=${label}>
    <button type="button" class="plain" disabled=${start === 0} onClick=${() => to(0)}>First</button>
    <button type="button" class="plain" disabled=${start === 0} onClick=${() => to(start - size)}>Previous</button>
    <span aria-live="polite">${count(start + 1)} to ${count(Math.min(length, start + size))} of ${count(length)}</span>
    <button type="button" class="plain" disabled=${start >= last} onClick=${() => to(start + size)}>Next</button>
    <button type="button" class="plain" disabled=${start >= last} onClick=${() => to(last)}>Last</button>
    <form class="row" onSubmit=${jump}><label>Place <input ref=${field} type="number" min="1" max=${length}/></label>
      <button class="plain">Go</button></form>
  </nav>`;
}
