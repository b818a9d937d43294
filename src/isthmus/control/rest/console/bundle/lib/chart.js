// A line chart on uPlot, with a sentence of the same for those who do not see it. Colours follow the page's.

import { short } from "./text.js";
import { html, useEffect, useRef, useState } from "./ui.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

// `data` is [xs, ys]; `name` and `unit` say what ys are.
export function Chart({ name, unit, data, colour, height = 220 }) {
  const place = useRef(null);
  const chart = useRef(null);
  const [scheme, setScheme] = useState(dark.matches);
  useEffect(() => {
    const changed = () => setScheme(dark.matches);
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, []);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const colours = ["--soft", "--grid", colour].map((one) => style.getPropertyValue(one).trim());
    const axis = { stroke: colours[0], grid: { stroke: colours[1], width: 1 }, ticks: { stroke: colours[1] }, font: "12px system-ui" };
    const options = {
      width: place.current.clientWidth || 600, height, legend: { show: false }, cursor: { y: false },
      scales: { x: { time: false } },
      axes: [{ ...axis, label: "step", labelFont: "12px system-ui", labelSize: 18 }, { ...axis, size: 62, values: (_, all) => all.map((one) => short(one, 4)) }],
      series: [{}, { stroke: colours[2], width: 2, points: { show: data[0].length < 40 } }],
    };
    chart.current = new window.uPlot(options, data, place.current);
    const resized = new ResizeObserver(([one]) => chart.current.setSize({ width: Math.max(100, one.contentRect.width), height }));
    resized.observe(place.current);
    return () => (resized.disconnect(), chart.current.destroy());
  }, [scheme]);
  useEffect(() => chart.current?.setData(data), [data]);
  const [steps, values] = data;
  const said = `${name} from ${short(values[0], 4)} at step ${steps[0]} to ${short(values.at(-1), 4)} ${unit} at step ${steps.at(-1)}`;
  return html`<figure class="figure" aria-label=${said}><div ref=${place} aria-hidden="true"></div>
    <figcaption class="hint">${said}.</figcaption></figure>`;
}
