"""What fails and what is true in a simulated pool: kill points, and every worker, whatever the software believes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

KILL_POINTS = {
    "server: before the append": 15,
    "server: between write and flush": 15,
    "server: between append and handle": 15,
    "server: before the orders go out": 50,
    "server: before the answer": 4,
    "agent: before it saves": 8,
    "agent: between saving and acting": 8,
}
"""Each kind of kill point, and in how many visits it kills once."""


@dataclass
class Chaos:
    """Where, when and how often things go wrong: a kill point kills once in `every` visits of its kind."""

    rng: random.Random
    on: bool = True
    every: dict[str, int] = field(default_factory=lambda: dict(KILL_POINTS))
    kills: Counter[str] = field(default_factory=Counter)

    def point(self, name: str) -> bool:
        """Tell whether to die here."""
        if not self.hit(1 / self.every[name]):
            return False
        self.kills[name] += 1
        return True

    def hit(self, probability: float) -> bool:
        return self.on and self.rng.random() < probability


@dataclass
class Worker:
    """One rank's process, as the site's system sees it."""

    state: str = "absent"
    exit_status: int | None = None
    checkin_s: float = 0.0
    finish_s: float | None = None
    fails: bool = False


class World:
    """Every worker of every site, and the truths that must hold of them whatever the software believes."""

    def __init__(self, chaos: Chaos) -> None:
        self.chaos, self.now_s = chaos, 0.0
        self.workers: dict[tuple[str, str, int, int], Worker] = {}
        self.starts: Counter[tuple[str, int, int]] = Counter()

    def worker(self, site: str, job: str, attempt: int, rank: int) -> Worker:
        return self.workers.setdefault((site, job, attempt, rank), Worker())

    def start(self, site: str, job: str, attempt: int, rank: int) -> None:
        worker = self.worker(site, job, attempt, rank)
        if worker.state != "absent":
            return
        self.starts[job, attempt, rank] += 1
        assert self.starts[job, attempt, rank] == 1, f"{job}/{attempt}/{rank} was started twice"
        for (_, other, their, _), one in self.workers.items():
            overlap = other == job and their != attempt and one.state == "running"
            assert not overlap, f"attempts {their} and {attempt} of {job} overlap"
        worker.state, worker.fails = "running", self.chaos.hit(0.15)
        worker.checkin_s = self.now_s + self.chaos.rng.uniform(0, 2)

    def stop(self, site: str, job: str, attempt: int, rank: int, *, force: bool) -> None:
        worker = self.worker(site, job, attempt, rank)
        if worker.state == "absent" or (worker.state == "running" and (force or not self.chaos.hit(0.5))):
            worker.state, worker.exit_status = "exited", 137 if force else 143

    def give_ranks(self, site: str, job: str, attempt: int, rank: int) -> None:
        worker = self.worker(site, job, attempt, rank)
        if worker.finish_s is None:
            worker.finish_s = self.now_s + self.chaos.rng.uniform(1, 6)

    def pass_time(self, now_s: float) -> None:
        self.now_s = now_s
        broken = {(j, a) for (_, j, a, _), w in self.workers.items() if w.state == "exited" and w.exit_status}
        for (_, job, attempt, _), worker in self.workers.items():
            if worker.state == "running" and worker.finish_s is not None and worker.finish_s <= now_s:
                worker.state, worker.exit_status = "exited", int(worker.fails)
            elif worker.state == "running" and (job, attempt) in broken and worker.finish_s is not None:
                worker.state, worker.exit_status = "exited", 1

    def running(self, site: str) -> int:
        return sum(key[0] == site and worker.state == "running" for key, worker in self.workers.items())
