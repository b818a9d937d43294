"""What of a component bears on whole states: of each server and each site, as columns over their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.state.job_records import TERMINAL_STATES
from tests.control.model.pool import committed, wrong_at
from tests.control.model.scenario import Scenario
from tests.control.model.server import wrong_in
from tests.control.model.site import Site

ATTEMPTS = 16
"""The largest number of attempts of a job that may be known at a time."""

F = TypeVar("F")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Of a server. `seen` is by place the hash of what it sees there: sites that it sees alike have the same.

    `committed` has a bit for each attempt of each job; `known` stands for the numbers that it knows.
    """

    wrong: str
    all_ended: bool
    committed: int
    seen: tuple[int, ...]
    known: int

    @classmethod
    def of(cls, server: Coordinator, scenario: Scenario, seen: tuple[int, ...], known: int) -> ServerFacts:
        """Return the facts of a coordinator."""
        attempts = (
            (place, attempt) for place, (job, _) in enumerate(scenario.jobs) for attempt in committed(server, job)
        )
        return cls(
            wrong=wrong_in(server),
            all_ended=all(job.state in TERMINAL_STATES for job in server.state.jobs.values()),
            committed=_bits(attempts),
            seen=seen,
            known=known,
        )


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """Of a site. `alive` has a bit for each attempt of each job with a process.

    `trains` is by job the attempt that trains here, 0 where none does.
    """

    wrong: str
    is_empty: bool
    alive: int
    trains: tuple[int, ...]
    known: int

    @classmethod
    def of(cls, site: Site, scenario: Scenario, known: int) -> SiteFacts:
        """Return the facts of a site."""
        places = {job: place for place, (job, _) in enumerate(scenario.jobs)}
        running = [(places[key[0]], key[1], one) for key, one in site.running() if key[1]]
        trains = {place: attempt for place, attempt, one in running if one.trains}
        return cls(
            wrong=wrong_at(site),
            is_empty=site.is_empty,
            alive=_bits((place, attempt) for place, attempt, _ in running),
            trains=tuple(trains.get(place, 0) for place in places.values()),
            known=known,
        )


class Facts(Generic[F]):
    """The facts of every component of a kind, by number."""

    def __init__(self) -> None:
        self._facts = list[F]()
        self._columns: dict[str, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, number: int) -> F:
        return self._facts[number]

    def add(self, facts: F) -> None:
        """Append those of the next component."""
        self._facts.append(facts)

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """Return one fact of all components, of a text only whether there is one."""
        known = self._columns.get(name)
        have = 0 if known is None else len(known)
        if known is None or have < len(self._facts):
            values = [getattr(one, name) for one in self._facts[have:]]
            fresh = np.array([bool(one) if isinstance(one, str) else one for one in values], dtype=np.int64)
            known = self._columns[name] = fresh if known is None else np.concatenate((known, fresh))
        return known


def _bits(attempts: Iterable[tuple[int, int]]) -> int:
    """Return one bit for each (place of the job, attempt)."""
    bits = 0
    for place, attempt in attempts:
        if attempt >= ATTEMPTS:
            raise OverflowError(f"attempt {attempt} of a job; the model has room for {ATTEMPTS - 1}")
        bits |= 1 << (place * ATTEMPTS + attempt)
    return bits
