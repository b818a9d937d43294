"""Ranks as `isthmus ranks` shows them and as the network controller of a pool needs them: between addresses."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveInt


class AddressPair(FrozenModel):
    """A demand of `gbps` from address `source` to address `target`; 0: no rate is predicted."""

    source: str
    target: str
    gbps: NonNegativeFloat = 0.0


class RankPeer(FrozenModel):
    """A rank to which another one sends, at `gbps` on average; `pairs` divide it over the network cards of both."""

    rank: NonNegativeInt
    cluster: Name
    gbps: NonNegativeFloat = 0.0
    pairs: tuple[AddressPair, ...] = ()


class RankView(FrozenModel):
    """A rank of a job: its cluster and node (`group/node`), its addresses by name of the network card, its peers.

    `port` is the one at which its worker listens. Without a worker it has no node, addresses and port.
    """

    rank: NonNegativeInt
    cluster: Name
    node: str = ""
    addresses: tuple[str, ...] = ()
    port: PositiveInt | None = None
    peers: tuple[RankPeer, ...] = ()
