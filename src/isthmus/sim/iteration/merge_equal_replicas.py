"""`merge_equal_replicas`: merges equal replicas, which are then simulated once, where that is exact."""

from __future__ import annotations

import itertools
from dataclasses import replace

from isthmus.schedule import Schedule
from isthmus.sim.iteration.simulated_training import Replica, SimulatedTraining, StageLoad


def expand_replicas(training: SimulatedTraining) -> tuple[tuple[Replica, ...], tuple[int, ...]]:
    """Return every replica separately, and the index of the first copy of each given replica."""
    alone: list[Replica] = []
    places = []
    for replica in training.replicas:
        places.append(len(alone))
        alone += [replace(replica, count=1)] * replica.count
    return tuple(alone), tuple(places)


def merge_equal_replicas(training: SimulatedTraining) -> tuple[tuple[Replica, ...], tuple[int, ...]]:
    """Return the classes of equal replicas, and the index of the class of each given replica.

    Equal replicas have equal timelines if they share only links with fair sharing and without jitter; other
    replicas stay separate.
    """
    classes: dict[tuple[int, tuple[StageLoad, ...]], int] = {}
    folded: list[Replica] = []
    places = []
    numbers = _number_schedules(training.replicas)
    for replica in training.replicas:
        if not _can_merge(training, replica):
            places.append(len(folded))
            folded += [replace(replica, count=1)] * replica.count
            continue
        key = numbers[id(replica.schedule)], replica.stages
        if key not in classes:
            classes[key] = len(folded)
            folded.append(replica)
        else:
            old = folded[classes[key]]
            folded[classes[key]] = replace(old, count=old.count + replica.count)
        places.append(classes[key])
    return tuple(folded), tuple(places)


def _number_schedules(replicas: tuple[Replica, ...]) -> dict[int, int]:
    """Return a number for each schedule object by `id`; equal schedules have equal numbers."""
    known: list[Schedule] = []
    numbers: dict[int, int] = {}
    for replica in replicas:
        schedule = replica.schedule
        if id(schedule) not in numbers:
            if schedule not in known:
                known.append(schedule)
            numbers[id(schedule)] = known.index(schedule)
    return numbers


def _can_merge(training: SimulatedTraining, replica: Replica) -> bool:
    used = set()
    for m in range(min(replica.schedule.num_micro_batches, max(1, len(replica.schedule.routes)))):
        clusters = [replica.stages[stage].cluster for stage, _ in replica.schedule.route(m)]
        for a, b in itertools.pairwise(clusters):
            used |= {(a, b), (b, a)} if a != b else set()
    links = [training.links[ends] for ends in used if ends in training.links]
    return all(training.sharing == "fair" and not link.jitter_s for link in links)
