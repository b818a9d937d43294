"""Conflicts of a job: sets of clusters that it cannot use together because a check has failed there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

Conflicts = Mapping[frozenset[str], tuple[str, float]]
"""The reason and the time (s) of each conflict: one cluster whose own check failed, or two that share no folder."""


def valid_conflicts(conflicts: Conflicts, now_s: float, valid_s: float) -> dict[frozenset[str], tuple[str, float]]:
    """Return the conflicts that are at most `valid_s` old."""
    return {clusters: found for clusters, found in conflicts.items() if now_s - found[1] <= valid_s}


def is_excluded(conflicts: Conflicts, clusters: Collection[str]) -> bool:
    """Return whether a plan on `clusters` has a conflict."""
    return any(one <= set(clusters) for one in conflicts)


def excluded_clusters(conflicts: Conflicts, num_chips: Mapping[str, int]) -> set[str]:
    """Return clusters without which no conflict is left: of two, the one with fewer chips."""
    found: set[str] = set()
    for clusters in sorted(conflicts, key=lambda one: (len(one), sorted(one))):
        if not clusters & found:
            found.add(min(clusters, key=lambda name: (num_chips.get(name, 0), name)))
    return found


def describe_conflicts(conflicts: Conflicts) -> str:
    """Return the reasons of all conflicts, each once."""
    return "; ".join(dict.fromkeys(reason for reason, _ in conflicts.values()))
