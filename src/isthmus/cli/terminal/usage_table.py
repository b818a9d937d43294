"""The tables of `isthmus usage`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.cli.history_text import local_time
from isthmus.cli.terminal.tables import table
from isthmus.core.views.usage_views import UsageView


def usage_table(found: UsageView) -> RenderableType:
    """Return the sums of owners and users, and each user's chip-hours at each cluster."""
    if found.since_s is None or not found.rows:
        return Text("No chips have been used.")
    rows = [(one.owner, one.cluster, one.user, f"{one.chip_hours:.2f}", str(one.num_chips)) for one in found.rows]
    return Group(
        Text(f"Chip-hours since {local_time(found.since_s)}"),
        *(Text(f"  {name} has given {hours:.2f}") for name, hours in found.given.items()),
        *(Text(f"  {name} has taken {hours:.2f}") for name, hours in found.taken.items()),
        Text(""),
        table("", ("owner", "cluster", "user", "chip-hours", "chips now"), rows, "cluster"),
    )
