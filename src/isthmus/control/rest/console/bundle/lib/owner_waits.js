// How long the jobs of an owner's own users waited that were submitted in a month, as measured in the pool.

import { get } from "./api.js";
import { count, seconds } from "./text.js";
import { Facts, html, Problem, useEffect, useState } from "./ui.js";

const PAGE_SIZE = 1000;
const MAX_PAGES = 20;

export function OwnerWaits({ owner, month }) {
  const { page, error } = useWaits(owner, month);
  if (error?.status === 404) return html`<h3>Waits of your own users</h3><p class="none">The operator lists no users of yours.</p>`;
  const waits = (page?.jobs ?? []).filter((one) => one.chips > 0).map((one) => one.waited_s).sort((a, b) => a - b);
  return html`<h3>Waits of your own users</h3>
    <${Problem} error=${error}/>
    ${page && html`<${Facts} facts=${[
      ["Users", count(page.num_users)],
      ["Jobs of the month", `${page.more ? "the first " : ""}${count(page.jobs.length)}`],
      ["Mean wait", waits.length ? seconds(waits.reduce((sum, one) => sum + one, 0) / waits.length) : ""],
      ["Median wait", waits.length ? seconds(percentile(waits, 0.5)) : ""],
      ["95 of 100 waited at most", waits.length ? seconds(percentile(waits, 0.95)) : ""],
    ]}/>
    <p class="hint">As they would have waited on your clusters alone: <code>isthmus waits --owner ${owner} --month ${month}</code></p>`}`;
}

// Return the jobs of the month, of at most MAX_PAGES pages.
function useWaits(owner, month) {
  const [found, set] = useState({ page: null, error: null });
  useEffect(() => {
    let wanted = true;
    const load = async () => {
      const jobs = [];
      let after = 0;
      let page = null;
      for (let at = 0; at < MAX_PAGES && after !== null; at += 1) {
        page = await get(`/v1/waits/${encodeURIComponent(owner)}?month=${month}&after=${after}&limit=${PAGE_SIZE}`);
        jobs.push(...page.jobs);
        after = page.after;
      }
      return { ...page, jobs, more: after !== null };
    };
    set({ page: null, error: null });
    load().then(
      (page) => wanted && set({ page, error: null }),
      (error) => wanted && !(error instanceof TypeError) && set({ page: null, error }),
    );
    return () => (wanted = false);
  }, [owner, month]);
  return found;
}

// Return the value that the given share of ordered values does not exceed (nearest rank).
function percentile(ordered, share) {
  return ordered[Math.max(0, Math.ceil(share * ordered.length) - 1)];
}
