"""`choose_nodes`: the nodes of the cheapest placement of equal units, by the curves of the domains that they are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.site.topology.curve_sums import Curve, add_curve, add_equal, empty_curve
from isthmus.site.topology.domain_curve import DomainCurves
from isthmus.site.topology.gang_cost import INFEASIBLE
from isthmus.site.topology.node_sum import NodeSum
from isthmus.site.topology.site_tree import SPINE

UnitNodes = tuple[int, ...]
"""The node of each piece of a unit."""


@dataclass(frozen=True)
class _Step:
    """One step of a sum of curves: the sum before and after it, and the domains whose curve it added."""

    before: Curve
    after: Curve
    members: Sequence[int]
    curve: Curve
    are_equal: bool


def choose_nodes(curves: DomainCurves, num_units: int) -> list[UnitNodes] | None:
    """Return the nodes of each unit of the cheapest placement of `num_units`, or None if they do not fit.

    Units are in the order of the tree, so that neighbours lie close to each other.
    """
    tree = curves.free.tree
    if not tree.levels:
        flat = _node_sum(curves, range(len(tree.nodes)))
        if len(flat.curve) <= num_units or flat.curve[num_units] >= INFEASIBLE:
            return None
        return [(node,) for node in flat.nodes_of(num_units)]
    top = len(tree.levels) - 1
    if tree.levels[top] == SPINE and top > 0:
        chosen = _over_spines(curves, top, num_units)
    else:
        chosen = _over_blocks(curves, top, tuple(range(len(tree.names[top]))), num_units)
    if chosen is None:
        return None
    level = top - 1 if tree.levels[top] == SPINE and top > 0 else top
    return [unit for domain, count in chosen for unit in _units_of(curves, level, domain, count)]


def _over_spines(curves: DomainCurves, top: int, num_units: int) -> list[tuple[int, int]] | None:
    """Choose domains below the spines: a spine costs once, however much it holds, or is left out."""
    tree = curves.free.tree
    total, opened = empty_curve(num_units), list[tuple[Curve, Curve, list[_Step]]]()
    span = curves.cost.spans.get(SPINE, 0)
    for spine, children in enumerate(tree.children[top]):
        if curves.free.sums[top][spine] < curves.piece_cards:
            continue
        inside, steps = np.minimum(total + span, INFEASIBLE), list[_Step]()
        for step in _sums(curves, top - 1, children, inside):
            steps.append(step)
            inside = step.after
        after = np.minimum(total, inside)
        opened.append((total, inside, steps))
        total = after
    if total[num_units] >= INFEASIBLE:
        return None
    found, left = list[tuple[int, int]](), num_units
    for before, inside, steps in reversed(opened):
        if inside[left] < before[left]:
            chosen, left = _trace(steps, left)
            found += chosen
    return found[::-1]


def _over_blocks(
    curves: DomainCurves, level: int, domains: tuple[int, ...], count: int
) -> list[tuple[int, int]] | None:
    total, steps = empty_curve(count), list[_Step]()
    for step in _sums(curves, level, domains, total):
        steps.append(step)
        total = step.after
    if total[count] >= INFEASIBLE:
        return None
    return _trace(steps, count)[0][::-1]


def _sums(curves: DomainCurves, level: int, domains: tuple[int, ...], total: Curve) -> Iterator[_Step]:
    """Yield the steps that add the curves of `domains` to `total`."""
    for whole, num, members, curve in curves.grouped(level, domains):
        if whole and num > 1:
            after = add_equal(total, curve, num)
            yield _Step(total, after, members, curve, True)
            total = after
            continue
        for member in members:
            after = add_curve(total, curve)
            yield _Step(total, after, (member,), curve, False)
            total = after


def _trace(steps: Sequence[_Step], count: int) -> tuple[list[tuple[int, int]], int]:
    """Return the domains that make up the sum at `count`, last first, each with its count, and what is left before."""
    found: list[tuple[int, int]] = []
    for step in reversed(steps):
        holds, target = len(step.curve) - 1, int(step.after[count])
        if step.before[count] == target:
            continue
        copies = range(min(len(step.members), count // holds + 1)) if step.are_equal else range(1)
        for full in copies:
            cost = full * int(step.curve[holds])
            part = _part(step, count - full * holds, target - cost)
            if part is None:
                continue
            members = iter(step.members)
            if part:
                found.append((next(members), part))
            found += [(next(members), holds) for _ in range(full)]
            count -= full * holds + part
            break
        else:
            raise AssertionError("the sum of curves has no origin")
    return found, count


def _part(step: _Step, count: int, target: int) -> int | None:
    """Return how many of `count` the one domain used in part, or in full, takes, so that the cost is `target`."""
    size = min(len(step.curve), count + 1)
    if size <= 0:
        return None
    costs = step.before[count - size + 1 : count + 1][::-1] + step.curve[:size]
    at = np.flatnonzero(costs == target)
    return int(at[0]) if len(at) else None


def _units_of(curves: DomainCurves, level: int, domain: int, count: int) -> list[UnitNodes]:
    """Return the nodes of `count` units, or pieces, in a domain."""
    tree, k = curves.free.tree, curves.unit_pieces
    is_unit_level = level == curves.unit_level and k > 1
    pieces = count * k if is_unit_level else count
    if level == 0:
        found: list[UnitNodes] = [(node,) for node in _node_sum(curves, tree.members[0][domain]).nodes_of(pieces)]
    else:
        chosen = _over_blocks(curves, level - 1, tree.children[level][domain], pieces)
        if chosen is None:
            raise AssertionError("a curve promised a place that its children do not have")
        found = [unit for child, part in chosen for unit in _units_of(curves, level - 1, child, part)]
    if not is_unit_level:
        return found
    flat = [node for unit in found for node in unit]
    return [tuple(flat[at : at + k]) for at in range(0, len(flat), k)]


def _node_sum(curves: DomainCurves, nodes: Sequence[int]) -> NodeSum:
    return NodeSum(curves.free, nodes, curves.cost, curves.piece_cards, curves.most)
