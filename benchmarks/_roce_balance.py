"""Queue pairs over four gateways: shares by weight, both directions, and a gateway that fails."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from benchmarks.table import Row
from isthmus.wan.control.choose_transport import RoceFlow
from isthmus.wan.control.pick_gateway import pick_gateway

NUM_FLOWS = 4096
WEIGHTS = {"equal": dict.fromkeys("abcd", 1.0), "1, 1, 2, 4": {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}}


def balance_rows(quick: bool) -> Iterator[Row]:
    """Shares of random sets of flows, and a gateway that fails.

    Flows are placed one after another with what gateways carry, half of them end, and others come; beside it, gateways
    by the hash of flow and weights alone.
    """
    num_sets = 2 if quick else 20
    sets = [_flows(Random(seed)) for seed in range(num_sets)]
    what = f"balance, {NUM_FLOWS:,} queue pairs, {num_sets} sets"
    for name, weights in WEIGHTS.items():
        placed = [_points(_renewed(flows, weights), weights) for flows in sets]
        hashed = [_points(Counter(pick_gateway(flow, weights) for flow in flows), weights) for flows in sets]
        sigma = max(_sigma_points(weight / sum(weights.values())) for weight in weights.values())
        yield Row(
            what=f"{what}, weights {name}, half of them renewed: share away from its weight, worst of all sets "
            f"(mean of the sets' worst {statistics.mean(placed):.2f})",
            ours=max(placed), unit="points", target="1", met=max(placed) <= 1,
        )  # fmt: skip
        yield Row(
            what=f"{what}, weights {name}, by the hash alone (mean of the sets' worst {statistics.mean(hashed):.2f}; "
            f"{sum(one > 1 for one in hashed)} sets beyond 1; binomial sigma {sigma:.2f})",
            ours=max(hashed), unit="points",
        )  # fmt: skip
    flows, weights = sets[0], WEIGHTS["1, 1, 2, 4"]
    picked = [pick_gateway(flow, weights) for flow in flows]
    back = [pick_gateway(replace(flow, source=flow.target, target=flow.source), weights) for flow in flows]
    same = 100 * sum(map(str.__eq__, picked, back)) / len(flows)
    yield Row(what="balance: queue pairs with one path both ways, by the hash alone", ours=same, unit="%",
              target="100", met=same == 100)  # fmt: skip
    carried, gateways = _placed(flows, weights)
    lost = [flow for flow, name in zip(flows, gateways, strict=True) if name == "d"]
    del carried["d"]
    start_s = time.process_time()
    for flow in lost:
        carried[pick_gateway(flow, weights | {"d": 0.0}, carried)] += 1
    spent_ms = 1000 * (time.process_time() - start_s)
    yield Row(
        what=f"balance: gateway d fails: CPU to place its {len(lost):,} queue pairs, others stay", ours=spent_ms,
        unit="ms", target="50", met=spent_ms <= 50,
    )  # fmt: skip


def _flows(rng: Random) -> list[RoceFlow]:
    """Return queue pairs between NICs of two sites."""
    return [
        RoceFlow(
            source=f"10.1.{rng.randrange(16)}.{rng.randrange(256)}",
            target=f"10.2.{rng.randrange(16)}.{rng.randrange(256)}",
            source_port=rng.randrange(49_152, 65_536), required_gbps=1,
        )
        for _ in range(NUM_FLOWS)
    ]  # fmt: skip


def _placed(flows: Sequence[RoceFlow], weights: Mapping[str, float]) -> tuple[Counter[str], list[str]]:
    carried: Counter[str] = Counter()
    picked = []
    for flow in flows:
        picked.append(pick_gateway(flow, weights, carried))
        carried[picked[-1]] += 1
    return carried, picked


def _renewed(flows: Sequence[RoceFlow], weights: Mapping[str, float]) -> Counter[str]:
    """Return what gateways carry after a random half of `flows` has ended and as many others have come."""
    carried, picked = _placed(flows, weights)
    rng = Random(len(weights))
    carried.subtract(rng.sample(picked, NUM_FLOWS // 2))
    for flow in _flows(rng)[: NUM_FLOWS // 2]:
        carried[pick_gateway(flow, weights, carried)] += 1
    return carried


def _points(carried: Mapping[str, int], weights: Mapping[str, float]) -> float:
    total = sum(weights.values())
    return 100 * max(abs(carried.get(name, 0) / NUM_FLOWS - weight / total) for name, weight in weights.items())


def _sigma_points(share: float) -> float:
    return 100 * math.sqrt(share * (1 - share) / NUM_FLOWS)
