r"""Text from others made visible: control, escape, bidirectional and invisible format characters as `\x1b`, `<U+202E>`.

Names, reasons, paths, logs and messages come from users, owners, agents, workers, files and servers. A terminal
executes some of their characters (ECMA-48), an editor or browser reorders text by others (Unicode Technical Report 36;
"Trojan Source", Boucher and Anderson 2021), and a line feed begins a new record of a log. Each edge that shows text to
a person passes it through here: the console of the command line, the formatters of logs, and the pages.
"""

from __future__ import annotations

import re

LINE_BREAKS = "\n\t"
"""What stays in a text of several lines."""

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ud800-\uf8ff\ufeff\uffa0\ufff9-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
    "\U000f0000-\U0010ffff]"
)
"""Control, format, private use, surrogate, line and paragraph separator (Cc, Cf, Co, Cs, Zl, Zp: Unicode Standard,
section 4.5), and the letters that show nothing. A literal: as a search of all characters it would take 0.3 s."""


def printable(text: str, *, keep: str = "", max_chars: int | None = None) -> str:
    """Return `text` as one line in which every hidden character is shown; those in `keep` stay.

    With `max_chars` the rest of a longer text is replaced by how long it is.
    """
    cut = text if max_chars is None else text[:max_chars]
    if not is_printable(cut):
        cut = _HIDDEN.sub(lambda found: _show(found[0], keep), cut)
    return cut if len(text) <= len(cut) or max_chars is None else f"{cut}... ({len(text)} characters)"


def is_printable(text: str) -> bool:
    """Return whether no character of `text` is hidden."""
    return (text.isascii() and text.isprintable()) or _HIDDEN.search(text) is None


def hidden_places(text: str) -> list[int]:
    """Return the index of every hidden character of `text`."""
    return [found.start() for found in _HIDDEN.finditer(text)]


def visible_json(text: str) -> str:
    r"""Return JSON with hidden characters inside strings as `\u202e`: the same values for a parser."""
    return _HIDDEN.sub(lambda found: found[0] if found[0] in LINE_BREAKS else _json_escape(found[0]), text)


def _show(char: str, keep: str) -> str:
    if char in keep:
        return char
    number = ord(char)
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char) or (
        f"\\x{number:02x}" if number < 0x100 else f"<U+{number:04X}>"
    )


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
