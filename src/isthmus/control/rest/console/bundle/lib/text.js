// Words and numbers as people read them. `printable` is the rule of isthmus.core.text.printable: a test compares both.

const HIDDEN = new RegExp(
  "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u0890\\u0891\\u08e2\\u115f\\u1160\\u180e" +
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ud800-\\uf8ff\\ufeff\\uffa0\\ufff9-\\ufffb\\u{110bd}" +
    "\\u{110cd}\\u{13430}-\\u{1343f}\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e007f}" +
    "\\u{f0000}-\\u{10ffff}]",
  "gu",
);
const SHORT = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

// Return `text` with every hidden character shown; the characters of `keep` stay.
export function printable(text, keep = "") {
  return text.replace(HIDDEN, (char) => {
    if (keep.includes(char)) return char;
    if (SHORT[char]) return SHORT[char];
    const number = char.codePointAt(0);
    const digits = number.toString(16);
    return number < 0x100 ? `\\x${digits.padStart(2, "0")}` : `<U+${digits.toUpperCase().padStart(4, "0")}>`;
  });
}

export function count(value) {
  return value === null || value === undefined ? "" : Math.round(value).toLocaleString("en-US");
}

// Return a number with the noun that it counts, "1 chip" or "2 chips".
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

// Return a number with about `digits` significant digits.
export function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(digits - 1);
  return Number(value.toPrecision(Math.max(digits, Math.floor(Math.log10(Math.abs(value) || 1)) + 1))).toLocaleString(
    "en-US",
    { maximumFractionDigits: 8 },
  );
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 1) return `${short(value * 1000)} ms`;
  if (value < 120) return `${short(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.round((value % 86400) / 3600)} h`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) [value, at] = [value / 1000, at + 1];
  return `${short(value)} ${units[at]}`;
}

// Return a time since the epoch in seconds, in the browser's zone, without the date if it is today.
export function time(at_s) {
  if (at_s === null || at_s === undefined) return "";
  const at = new Date(at_s * 1000);
  const clock = at.toLocaleTimeString("sv-SE");
  return at.toDateString() === new Date().toDateString() ? clock : `${at.toLocaleDateString("sv-SE")} ${clock}`;
}

export function millionths(value, currency) {
  return `${(value / 1e6).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 6 })} ${currency}`;
}

export function cents(value, currency) {
  return `${(value / 100).toLocaleString("en-US", { minimumFractionDigits: 2 })} ${currency}`;
}

export function percent(fraction) {
  return `${short(fraction * 100)} %`;
}
