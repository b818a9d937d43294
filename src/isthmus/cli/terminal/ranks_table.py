"""The table of `isthmus ranks`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from isthmus.cli.terminal.tables import table
from isthmus.core.views.rank_views import RankPeer, RankView


def ranks_table(ranks: Sequence[RankView]) -> RenderableType:
    """Return the table of a job's ranks; a peer in another cluster is shown with its predicted rate."""
    rows = [
        (
            str(one.rank) + (" (master)" if one.rank == 0 else ""),
            one.cluster,
            one.node or "-",
            " ".join(one.addresses) or "-",
            ", ".join(_peer_text(one, peer) for peer in one.peers) or "-",
        )
        for one in ranks
    ]
    return table("", ("rank", "cluster", "node", "addresses", "peers"), rows, "rank")


def _peer_text(one: RankView, peer: RankPeer) -> str:
    if peer.cluster == one.cluster:
        return str(peer.rank)
    return f"{peer.rank} in {peer.cluster}" + (f" {peer.gbps:.3g} Gbit/s" if peer.gbps else "")
