"""`bound_s`: seconds below which no plan in Sailor's form ends, by its simulator's formula.

A plan here is any set of pipelines with as many replicas at every stage: each replica of each stage on chips
of any place, under any measured tensor parallelism, layers split anyhow, head and embedding even on stages of
their own. Its chips are priced instead of limited: for prices `p` per place, what all replicas use costs at
most sum(p x chips there), so that the mean replica's seconds and price are at least those of the cheapest
split, which dynamic programming over (stages, layers) finds. The slowest stage is enumerated by halving.
Loose where chips do not divide into whole stages, where stages of several kinds wait for one another, and by
messages, which are taken at the best rate that any neighbour has.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks._sailor import FLOAT_BYTES, Case, Place, Tables

Array = Any
"""Of numpy, float64."""

PRICES = np.array([0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 2.0, 1e5])
"""Seconds per chip, at the first place; the last tells what chips do not suffice for at all."""

RELATIVE = np.array([0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.8, 1.2])
"""Price at the second place over that at the first."""

PRECISION = 1e-3


@dataclass
class Stages:
    """What stages take under one micro-batch size: seconds by place and cut, and number of decoder layers."""

    case: Case
    tables: Tables
    size: int

    @cached_property
    def options(self) -> list[tuple[int, Place, int]]:
        """Every (number of the place, place, tensor parallelism) that was measured."""
        return [
            (number, place, tp)
            for number, place in enumerate(self.case.chips)
            for tp in (1, 2, 4)
            if self.tables.times_of(place[0], self.size, tp)
        ]

    @cached_property
    def layers(self) -> int:
        """Layers of the decoder."""
        return self.tables.num_layers - 2

    def seconds(self, is_first: bool, is_last: bool, in_flight: int) -> Array:
        """Return the seconds [option, decoder layers] of a stage, infinite where it does not fit."""
        rows = [self._row(place, tp, is_first, is_last, in_flight) for _, place, tp in self.options]
        return np.array(rows)

    def _row(self, place: Place, tp: int, is_first: bool, is_last: bool, in_flight: int) -> list[float]:
        tables, size = self.tables, self.size
        measured = tables.times_of(place[0], size, tp)
        left = tables.room_bytes(place[0], tp)
        each, row = measured.layer_s if measured else (), list[float]()
        first, head = (0 if is_first else 1), self.layers + 1
        for count in range(self.layers + 1):
            members = [*range(first, count + 1), *([head] if is_last else [])]
            if not members:
                row.append(math.inf)
                continue
            held = sum(tables.state_bytes(one, tp) + in_flight * tables.held_bytes(one, tp, size) for one in members)
            sending_s = self._sending(place, tp, is_first, is_last, alone=is_last and count == 0)
            row.append(sum(each[i] for i in members) + sending_s if held <= left else math.inf)
        return row

    def _sending(self, place: Place, tp: int, is_first: bool, is_last: bool, alone: bool) -> float:
        """Return the least seconds of a stage's messages: the first stage's one way, others' both."""
        if is_first and is_last:
            return 0.0
        message = self.tables.message_bytes(self.layers + 1 if alone else 1, self.size)
        one = min(self.tables.send_s(place, tp, other, cut, message) for _, other, cut in self.options)
        return one if is_first else 2 * one

    def _known(self, *key: Any) -> Array:
        if key not in self._rows:
            self._rows[key] = self.seconds(*key)
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[Any, Array]:
        return {}

    @cached_property
    def place_prices(self) -> Array:
        """Prices [price, place]."""
        relative = RELATIVE if len(self.case.chips) > 1 else RELATIVE[-1:]
        rows = [
            [price, *[price * other] * (len(self.case.chips) - 1)]
            for price, other in itertools.product(PRICES, relative)
        ]
        return np.array(rows)

    @cached_property
    def prices(self) -> Array:
        """Prices [price, option] of one replica of one stage."""
        return np.stack([self.place_prices[:, number] * tp for number, _, tp in self.options], axis=1)

    def least(self, slowest_s: float, replicas: int) -> Array:
        """Return bounds [stages - 1] on the sum of a replica's stages, none of them above `slowest_s`."""

        def cheapest(is_first: bool, is_last: bool, in_flight: int) -> Array:
            seconds = self._known(is_first, is_last, in_flight)
            within = np.where(seconds <= slowest_s, seconds, np.inf)
            return (within[None] + self.prices[:, :, None]).min(axis=1)

        paid = self.place_prices @ np.array(list(self.case.chips.values())) / replicas
        count, bounds = self.layers, []
        before = cheapest(False, True, 1)
        bounds.append((cheapest(True, True, 1)[:, count] - paid).max())
        shift = np.arange(count + 1)[:, None] - np.arange(count + 1)[None]
        for stages in range(2, count + 3):
            start = cheapest(True, False, stages)
            bounds.append(((before[:, ::-1] + start).min(axis=1) - paid).max())
            middle = cheapest(False, False, stages)
            joined = np.where(shift >= 0, before[:, np.maximum(shift, 0)], np.inf) + middle[:, None, :]
            before = joined.min(axis=2)
        return np.array(bounds)


def bound_s(case: Case, tables: Tables, best_s: float) -> float:
    """Return seconds that every plan takes, or `best_s` where none can be faster than that."""
    queue: list[tuple[float, int, int, float, float]] = []
    stages = {size: Stages(case, tables, size) for size in tables.micro_batch_sizes(case.kinds)}
    for size, one in stages.items():
        if not one.options:
            continue
        total = -(-case.samples // size)
        for each in {-(-total // replicas) for replicas in range(1, case.num_chips + 1)}:
            heapq.heappush(queue, (0.0, size, each, 0.0, best_s / max(1, each - 1)))
    while queue:
        least_s, size, each, low_s, high_s = heapq.heappop(queue)
        if least_s >= best_s:
            return best_s
        if (high_s - low_s) * max(1, each - 1) <= PRECISION * best_s:
            return least_s
        middle_s = (low_s + high_s) / 2
        for a_s, b_s in ((low_s, middle_s), (middle_s, high_s)):
            found = _least_s(stages[size], each, a_s, b_s)
            if found < best_s:
                heapq.heappush(queue, (max(found, least_s), size, each, a_s, b_s))
    return best_s


def _least_s(stages: Stages, each: int, low_s: float, high_s: float) -> float:
    """Return a bound on plans of `each` micro-batches a replica, their slowest stage within the interval."""
    case, tables = stages.case, stages.tables
    replicas = -(-case.samples // (stages.size * each))
    sums = stages.least(high_s, replicas)
    update_s = min(
        row.update_s for _, (kind, _), tp in stages.options if (row := tables.times_of(kind, stages.size, tp))
    )
    rings = [_ring_s(stages, count, replicas) for count in range(1, len(sums) + 1)]
    sums = np.maximum(sums, low_s) + np.array(rings)
    return float((each - 1) * low_s + sums.min() + update_s)


def _ring_s(stages: Stages, count: int, replicas: int) -> float:
    """Return a bound on the all-reduces of `count` stages: inside pipelines, cut by four, and between."""
    case, tables = stages.case, stages.tables
    num_bytes = sum(tables.parameters(layer, 1) for layer in range(tables.num_layers)) * FLOAT_BYTES / count
    inside = (one for one in range(1, replicas + 1) if replicas % one == 0)
    return min(
        tables.ring_s(place, place, num_bytes / 4, one) + tables.ring_s(place, place, num_bytes, replicas // one)
        for one in inside
        for place in case.chips
    )
