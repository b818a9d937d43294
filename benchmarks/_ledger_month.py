"""A month of jobs for the meter: what each holds when, which attempts are lost, and what prices owners publish."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from isthmus.control.accounting.holdings import Holding
from isthmus.core.owner.tariff import Tariff
from isthmus.core.pool_resource import PoolResource

SITES = tuple(f"site-{number}" for number in range(8))
USERS = tuple(f"user-{number}" for number in range(200))
DAY_S = 86_400.0
MONTH_S = 31 * DAY_S


class Act(NamedTuple):
    """What one job does at a time: it holds this from now on, has saved, has lost the attempt, or has ended."""

    at_s: float
    number: int
    job: str
    user: str
    holdings: tuple[Holding, ...]
    saved: bool = False
    lost_by: str = ""
    ended: bool = False


def acts_of(number: int, rng: random.Random) -> Iterator[Act]:
    """Yield what a job does in a month: one attempt, or two if the first one is lost."""
    at_s, sites = rng.uniform(0, MONTH_S - 2 * DAY_S), rng.sample(SITES, rng.choice((1, 1, 1, 2, 3)))
    job, user, chips = f"job-{number}", USERS[number % len(USERS)], rng.choice((1, 8, 16, 64))

    def act(attempt: int, phase: Any, held: Sequence[str] = sites, **more: Any) -> Act:
        late = (f"owner-of-{sites[-1]}",) if len(held) < len(sites) else ()
        holdings = tuple(
            Holding(
                attempt=attempt, cluster=site, owner=f"owner-of-{site}", phase=phase, late=late,
                away=more.get("away") == site,
                amounts=((PoolResource.chips(site, "g"), chips), (PoolResource.storage(site), 10**12)),
            )
            for site in held
        )  # fmt: skip
        return Act(at_s, number, job, user, holdings, **{key: one for key, one in more.items() if key != "away"})

    is_lost = rng.random() < 0.1
    for attempt in (1, 2) if is_lost else (1,):
        if len(sites) > 1:
            yield act(attempt, "waiting", sites[:-1])
            at_s += rng.expovariate(1 / 20)
        yield act(attempt, "starting")
        at_s += rng.expovariate(1 / 60)
        yield act(attempt, "running")
        at_s += rng.expovariate(1 / 7200)
        if rng.random() < 0.05:
            yield act(attempt, "running", away=sites[0])
            at_s += rng.expovariate(1 / 600)
            yield act(attempt, "running")
            at_s += rng.expovariate(1 / 3600)
        yield act(attempt, "running", saved=rng.random() < 0.7)
        at_s += rng.expovariate(1 / 1800)
        loses = is_lost and attempt == 1
        yield act(attempt, "leaving", lost_by=f"owner-of-{sites[0]}" if loses else "")
        at_s += rng.expovariate(1 / 10)
        yield act(attempt, "leaving", (), ended=not loses)
        at_s += rng.expovariate(1 / 300)


def month_of(jobs: int, seed: int) -> list[Act]:
    """Return the acts of all jobs in the order of time."""
    streams = (acts_of(number, random.Random(f"{seed}/{number}")) for number in range(jobs))
    return list(heapq.merge(*streams, key=lambda one: (one.at_s, one.number)))


def tariffs_of(seed: int) -> Iterator[tuple[float, Tariff]]:
    """Yield tariffs and when they are published: of every site at once, and of one of them on each day."""
    rng = random.Random(f"{seed}/tariffs")
    for day in range(31):
        for site in SITES if day == 0 else rng.sample(SITES, 1):
            night, noon = (f"{rng.randint(100_000, 9_000_000) / 10**6:.6f}" for _ in range(2))
            chips = {"cluster": site, "node_group": "g"}
            prices = [
                chips | {"per_chip_hour": night, "hours": "20:00-08:00"},
                chips | {"per_chip_hour": noon, "hours": "08:00-20:00"},
                {"cluster": site, "per_tb_hour": "0.010001"},
            ]
            yield day * DAY_S, Tariff.model_validate({"currency": "EUR", "prices": prices})
