"""`relay_ranks`: which ranks that decode are asked for weights before the rank that trains."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.plan_parts.rollout_place import RolloutPlace


def relay_ranks(rollouts: Sequence[RolloutPlace], number: int, first: int) -> tuple[int, ...]:
    """Return the relays of rollout `number`, the nearest first; rollout 0 is rank `first`.

    The first rank of a cluster asks the first ranks of its `sources`; the others of the cluster ask that one, so that
    weights come to a cluster once.
    """
    firsts: dict[str, int] = {}
    for place, one in enumerate(rollouts):
        firsts.setdefault(one.cluster, place)
    own = rollouts[number]
    clusters = ([] if firsts[own.cluster] == number else [own.cluster]) + list(own.sources)
    return tuple(first + firsts[one] for one in dict.fromkeys(clusters) if one in firsts and firsts[one] != number)
