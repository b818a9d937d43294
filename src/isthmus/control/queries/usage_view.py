"""`usage_view`: the chip-hours that owners have given and users have taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from isthmus.control.state.job_records import PoolState
from isthmus.core.views.usage_views import UsageRow, UsageView


def usage_view(
    state: PoolState, now_s: float, *, owner: str | None = None, cluster: str | None = None, user: str | None = None
) -> UsageView:
    """Return the usage at `now_s` of one owner, cluster or user; None stands for all of them."""
    wanted = (owner, cluster, user)
    rows = tuple(
        UsageRow(owner=key[0], cluster=key[1], user=key[2], chip_hours=used_chip_s / 3600, num_chips=num_chips)
        for key, used_chip_s, num_chips in state.chip_use.amounts(now_s)
        if all(one in (None, name) for one, name in zip(wanted, key, strict=True))
    )
    return UsageView(
        since_s=state.chip_use.since_s,
        now_s=now_s,
        given=_sums((row.owner, row.chip_hours) for row in rows),
        taken=_sums((row.user, row.chip_hours) for row in rows),
        rows=rows,
    )


def _sums(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for name, amount in amounts:
        found[name] += amount
    return dict(sorted(found.items()))
