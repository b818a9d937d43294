"""`wan_record`, `wan_text`: what `isthmus demo --wan` adds to its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.cli.demo.wide_area import WideArea

Losses = Sequence[tuple[int, float]]


def wan_record(
    area: WideArea, crossed: Sequence[dict[str, object]], losses: Losses, alone: Losses
) -> dict[str, object]:
    """Return what crossed the links, and whether both runs have the same losses, bit for bit."""
    return {
        "wan": area.mode,
        "wan_note": area.note,
        "crossed": list(crossed),
        "losses_compared": len(losses),
        "losses_equal": [value for _, value in losses] == [value for _, value in alone] and bool(losses),
    }


def wan_text(result: dict[str, Any]) -> str:
    """Return the lines for people."""
    lines = []
    for one in result["crossed"]:
        if one["by"] == "proxy":
            lines.append(
                f"{one['from']} to {one['to']}: {one['sent_bytes']:,} bytes sent, {one['received_bytes']:,} received "
                f"over {one['streams']} streams, {one['frames_again']} frames sent again"
            )
        else:
            lines.append(
                f"{one['from']} to {one['to']}: {one['by']} took {one['frames_taken']:,} RoCE frames and handed over "
                f"{one['frames_handed']:,}; the link lost {one['frames_sent_again']:,}, sent again"
            )
    same = "the same bits as" if result["losses_equal"] else "other bits than"
    lines.append(f"All {result['losses_compared']} losses have {same} without the wide-area network.")
    return "\n" + "\n".join(lines)
