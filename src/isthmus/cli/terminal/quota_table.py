"""`quota_table`: accounts with what they use of their limits, projects as a tree."""

from __future__ import annotations

from rich.table import Table

from isthmus.core.text.printable import printable
from isthmus.core.units import MILLIONTHS
from isthmus.core.views.quota_views import QuotaRow, QuotaView

MAX_DEPTH = 16


def quota_table(found: QuotaView) -> Table:
    """Return a row for each account: chips now, chip-hours and money of the month, each with its limit.

    Below it is a row for each cluster and node group at which it has a guarantee or a limit.
    """
    table = Table(box=None, pad_edge=False)
    for title in ("account", "guaranteed", "chips", "chip-hours", f"spend {found.currency}".strip(), "waiting", "jobs"):
        table.add_column(title, justify="left" if title in ("account", "jobs") else "right")
    parents = {row.name: row.parent for row in found.rows if row.kind == "project"}
    for row in found.rows:
        spent = f"{row.spend_millionths / MILLIONTHS:,.2f}"
        most = None if row.max_spend_millionths is None else f"{row.max_spend_millionths / MILLIONTHS:,.2f}"
        table.add_row(
            "  " * _depth(row, parents) + printable(f"{row.kind} {row.name}"),
            f"{row.guaranteed_chips:,}" if row.kind == "project" else "",
            _of(f"{row.num_chips:,}", row.max_chips),
            _of(f"{row.chip_hours:,.1f}", row.max_chip_hours),
            _of(spent, most),
            f"{row.num_capped:,}" if row.num_capped else "",
            printable(", ".join(row.jobs)),
        )
        for place in row.places:
            where = place.cluster + (f"/{place.node_group}" if place.node_group else "")
            table.add_row(
                "  " * (_depth(row, parents) + 1) + printable(f"at {where}"),
                f"{place.guaranteed_chips:,}" if row.kind == "project" else "",
                _of(f"{place.num_chips:,}", place.max_chips),
            )
    return table


def _of(used: str, limit: int | str | None) -> str:
    return used if limit is None else f"{used} of {limit:,}" if isinstance(limit, int) else f"{used} of {limit}"


def _depth(row: QuotaRow, parents: dict[str, str | None]) -> int:
    depth, at = 0, row.parent
    while at is not None and at in parents and depth < MAX_DEPTH:
        depth, at = depth + 1, parents[at]
    return depth
