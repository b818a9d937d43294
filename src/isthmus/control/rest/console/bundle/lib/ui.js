// Elements and hooks: preact with htm. Every text child passes through `printable` and reaches the page as a text node,
// so the words of others are never HTML; the page's policy (Trusted Types) refuses what would make them so.

import { h, render, Fragment } from "../vendor/preact.js";
import htm from "../vendor/htm.js";
import { printable } from "./text.js";

export { render, Fragment };
export { useEffect, useMemo, useRef, useState, useCallback } from "../vendor/hooks.js";

const SHOWN = ["title", "aria-label", "placeholder", "alt"];

function shown(child) {
  if (typeof child === "string") return printable(child, "\n\t");
  return Array.isArray(child) ? child.map(shown) : child;
}

function element(type, props, ...children) {
  for (const name of SHOWN) if (typeof props?.[name] === "string") props[name] = printable(props[name], "\n\t");
  return h(type, props, ...children.map(shown));
}

export const html = htm.bind(element);

// A section with a heading, which names it.
export function Card({ title, id, children, aside }) {
  const name = id ?? title.toLowerCase().replace(/[^a-z]+/g, "-");
  return html`<section aria-labelledby=${`h-${name}`}>
    <div class="cardhead"><h2 id=${`h-${name}`}>${title}</h2>${aside}</div>${children}
  </section>`;
}

export function Facts({ facts }) {
  const known = facts.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return html`<dl class="facts">${known.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// A table; a column is [title, cell(row), "number"?]. A wide one scrolls, also by keyboard.
export function Table({ label, columns, rows, empty = "None.", rowKey = (row, at) => at }) {
  if (!rows.length) return html`<p class="none">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`${label}: table`}><table>
    <thead><tr>${columns.map(([title, , kind]) => html`<th scope="col" class=${kind} key=${title}>${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row, at) => html`<tr key=${rowKey(row, at)}>
      ${columns.map(([title, cell, kind]) => html`<td class=${kind} key=${title}>${cell(row, at)}</td>`)}
    </tr>`)}</tbody>
  </table></div>`;
}

export function Problem({ error }) {
  if (!error) return null;
  return html`<div class="problem" role="alert"><p>${error.message}</p>${error.hint && html`<p class="hint">${error.hint}</p>`}</div>`;
}

const KINDS = {
  running: "good", succeeded: "good", failed: "bad", cancelled: "off", stopping: "warm", preempting: "warm",
  blocked: "warm", waiting: "warm", choosing: "warm",
};

export function State({ state }) {
  return html`<span class=${`state s-${KINDS[state] ?? "busy"}`}>${state}</span>`;
}

export function JobLink({ id }) {
  return html`<a href=${`#/job/${encodeURIComponent(id)}`}>${id}</a>`;
}

// A bar that fills with a fraction of its width.
export function Bar({ fraction, label }) {
  return html`<meter min="0" max="1" value=${Math.min(1, Math.max(0, fraction))} aria-label=${label}></meter>`;
}
