"""`group_steps`: the steps of a named strategy among the ranks of a process group, without participants beside them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from isthmus.core.errors import PlanError
from isthmus.strategies.make_steps import STRATEGIES, find_strategy, steps
from isthmus.strategies.step import Step

RANK_STRATEGIES = tuple(name for name, one in STRATEGIES.items() if one.aggregator != "switch")
"""Strategies that ranks alone execute; some of them play the parameter servers."""

MAX_SLICES, MIN_SLICE_ELEMENTS = 4, 2**12
"""A rank's part of a slice has at least 16 KiB of fp32: smaller messages cost more time than their overlap saves."""


def group_steps(name: str, cluster_of: Sequence[str], num_elements: int) -> tuple[Step, ...]:
    """Return the steps by which ranks sum `num_elements` elements everywhere; `cluster_of[r]` is that of rank `r`.

    A cluster is a host of the strategy. A parameter server's share of the elements is summed by one of the ranks that
    send it, in turns, so there are as many servers as hosts, or as workers where all send all elements. Elements are
    cut in up to `MAX_SLICES` slices, each of which is summed by itself: a rank sends one on while the next arrives, so
    rounds overlap. Raises `PlanError` for a strategy with a switch, or clusters of unequal size; `InputError` for an
    unknown name.
    """
    if find_strategy(name).aggregator == "switch":
        raise PlanError(
            f"strategy '{name}' sums in a switch", hint=f"choose one that ranks execute: {', '.join(RANK_STRATEGIES)}"
        )
    sizes = Counter(cluster_of)
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{cluster}: {size}" for cluster, size in sizes.items())
        raise PlanError(
            f"strategy '{name}' needs equally many ranks in each cluster ({text})",
            hint="leave the strategy out: the default takes any clusters",
        )
    near: dict[str, list[int]] = {}
    for rank, cluster in enumerate(cluster_of):
        near.setdefault(cluster, []).append(rank)
    ranks = [rank for of in near.values() for rank in of]
    hosts, chips = len(near), len(ranks) // len(near)
    num_servers = len(ranks) if name == "parameter-server" else hosts
    found = []
    for start, stop in pairwise(_ends(num_elements, len(ranks))):
        plan = steps(name, hosts, chips, stop - start, num_aggregators=num_servers)
        found += [
            replace(
                step, sender=ranks[step.sender], receiver=ranks[step.receiver],
                start=start + step.start, stop=start + step.stop,
            )
            for step in _play_servers(plan, len(ranks))
        ]  # fmt: skip
    return tuple(sorted(found, key=lambda step: (step.round, step.start)))


def _ends(num_elements: int, num_ranks: int) -> list[int]:
    """Return where slices end, 0 first: of `MIN_SLICE_ELEMENTS` for each rank at least."""
    num = min(max(num_elements // (MIN_SLICE_ELEMENTS * num_ranks), 1), MAX_SLICES)
    return [num_elements * place // num for place in range(num + 1)]


def _play_servers(plan: Sequence[Step], num_workers: int) -> list[Step]:
    """Return `plan` with each server replaced, for each range, by one of the workers that send it that range."""
    senders: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for step in plan:
        if step.receiver >= num_workers:
            senders[step.receiver, step.start, step.stop].append(step.sender)
    players = {key: sorted(of)[(key[0] - num_workers) % len(of)] for key, of in senders.items()}

    def player(participant: int, step: Step) -> int:
        return participant if participant < num_workers else players[participant, step.start, step.stop]

    found = [replace(step, sender=player(step.sender, step), receiver=player(step.receiver, step)) for step in plan]
    return [step for step in found if step.sender != step.receiver]
