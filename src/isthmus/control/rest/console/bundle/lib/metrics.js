// The step metrics of a job: the newest page, then what arrives; by step and rank, a later attempt replacing an earlier.

import { get } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./ui.js";

const PAGE = 2000;
const MAX_STEPS = 20000;

export class StepTable {
  constructor() {
    this.bySteps = new Map();
    this.newest = null;
  }

  add(metrics) {
    for (const one of metrics) {
      const ranks = this.bySteps.get(one.step) ?? new Map();
      const known = ranks.get(one.rank);
      if (!known || known.attempt <= one.attempt) ranks.set(one.rank, one);
      this.bySteps.set(one.step, ranks);
      if (one.spans.length) this.newest = Math.max(this.newest ?? 0, one.step);
    }
    if (this.bySteps.size > MAX_STEPS) {
      for (const step of this.steps().slice(0, this.bySteps.size - MAX_STEPS)) this.bySteps.delete(step);
    }
    for (const [step, ranks] of this.bySteps) {
      if (this.newest === null || step >= this.newest - 3) continue;
      for (const one of ranks.values()) if (one.spans.length) [one.spans, one.messages] = [[], []]; // only drawn of the newest
    }
  }

  steps() {
    return [...this.bySteps.keys()].sort((a, b) => a - b);
  }

  // Return [steps, values] of a metric, the largest over the ranks that reported it.
  series(key) {
    const steps = [];
    const values = [];
    for (const step of this.steps()) {
      const found = [...this.bySteps.get(step).values()].map((one) => one.values[key]).filter(Number.isFinite);
      if (found.length) (steps.push(step), values.push(Math.max(...found)));
    }
    return [steps, values];
  }

  // Return the median of a metric over the steps, without the first one (cold caches); null without any.
  median(key) {
    const [, values] = this.series(key);
    const steady = (values.length > 1 ? values.slice(1) : values).sort((a, b) => a - b);
    if (!steady.length) return null;
    const middle = steady.length >> 1;
    return steady.length % 2 ? steady[middle] : (steady[middle - 1] + steady[middle]) / 2;
  }

  rank(step) {
    return [...(this.bySteps.get(step)?.values() ?? [])].sort((a, b) => a.rank - b.rank);
  }
}

// Return {table, version, more}: `more()` reads what has arrived since; `version` changes with the table.
export function useMetrics(path) {
  const state = useRef({ table: new StepTable(), next: null, busy: false, again: false });
  const [version, setVersion] = useState(0);
  const more = useCallback(async () => {
    const one = state.current;
    if (one.busy) return void (one.again = true);
    one.busy = true;
    try {
      do {
        one.again = false;
        const query = one.next === null ? `newest=true&limit=${PAGE}` : `after=${one.next}&limit=${PAGE}`;
        const page = await get(`${path}/metrics?${query}`);
        one.table.add(page.metrics);
        one.next = page.next;
        if (page.metrics.length) setVersion((old) => old + 1);
        if (page.metrics.length === PAGE) one.again = true;
      } while (one.again);
    } catch {
      // The page says when no server answers; the next event asks again.
    } finally {
      one.busy = false;
    }
  }, [path]);
  useEffect(() => void more(), [more]);
  return { table: state.current.table, version, more };
}
