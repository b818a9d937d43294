"""`nvidia_links`: which cards of a node NVLink joins, from the table that `nvidia-smi topo -m` prints."""

from __future__ import annotations

import re
import subprocess

from isthmus.core.pool_parts.group_topology import MAX_CARD_LINKS, CardLink

GBPS_PER_NVLINK = 200.0
"""One direction of an NVLink of the second to the fourth generation: 25 GB/s."""
MAX_TEXT_CHARS = 4_000_000
MAX_CARDS = 128
TIMEOUT_S = 20.0
_ROW = re.compile(r"\s*GPU(\d{1,4})\s+(.*)")
_LINKS = re.compile(r"NV(\d{1,2})")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}m")


def read_links() -> str:
    """Return the table of this machine; "" where there is none."""
    try:
        done = subprocess.run(
            ("nvidia-smi", "topo", "-m"), stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S,  # noqa: S607
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:MAX_TEXT_CHARS].decode(errors="replace") if done.returncode == 0 else ""


def nvidia_links(text: str) -> tuple[CardLink, ...]:
    """Return the groups of cards that are joined by equally many NVLinks, each with each; none for any other text.

    A card is in one group: that of its most links.
    """
    rows = _rows(_COLOUR.sub("", text[:MAX_TEXT_CHARS]))
    found: list[CardLink] = []
    left = set(rows)
    for num_links in sorted({links for row in rows.values() for links in row.values()}, reverse=True):
        for first in sorted(left):
            group = [first]
            for card in sorted(left - {first}):
                if all(rows[card].get(one) == rows[one].get(card) == num_links for one in group):
                    group.append(card)
            if len(group) > 1 and len(found) < MAX_CARD_LINKS and left.issuperset(group):
                found.append(CardLink(cards=tuple(group), gbps=num_links * GBPS_PER_NVLINK))
                left -= set(group)
    return tuple(sorted(found, key=lambda one: one.cards))


def _rows(text: str) -> dict[int, dict[int, int]]:
    """Return by card how many NVLinks join it to each other one."""
    rows: dict[int, dict[int, int]] = {}
    for line in text.splitlines():
        row = _ROW.fullmatch(line)
        if row is None or "X" not in row[2].split():
            continue
        cells = row[2].split()
        links = {at: int(found[1]) for at, cell in enumerate(cells[:MAX_CARDS]) if (found := _LINKS.fullmatch(cell))}
        if int(row[1]) < MAX_CARDS:
            rows[int(row[1])] = {at: number for at, number in links.items() if number}
    return rows
