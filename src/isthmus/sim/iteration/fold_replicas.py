"""`fold_replicas`: equal replicas run as one where that changes nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace

from isthmus.schedule import Schedule
from isthmus.sim.iteration.training import Replica, StageLoad, Training


def unfold_replicas(training: Training) -> tuple[tuple[Replica, ...], tuple[int, ...]]:
    """Return every replica alone, and for each replica given the place of its first copy."""
    alone: list[Replica] = []
    places = []
    for replica in training.replicas:
        places.append(len(alone))
        alone += [replace(replica, count=1)] * replica.count
    return tuple(alone), tuple(places)


def fold_replicas(training: Training) -> tuple[tuple[Replica, ...], tuple[int, ...]]:
    """Return the classes of equal replicas, and for each replica given the place of its class.

    Equal replicas stay in step, and can run as one, where they meet only on wires that are shared fairly and
    without jitter. Others stay apart.
    """
    classes: dict[tuple[int, tuple[StageLoad, ...]], int] = {}
    folded: list[Replica] = []
    places = []
    numbers = _number_schedules(training.replicas)
    for replica in training.replicas:
        if not _in_step(training, replica):
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
    """Return a number per schedule object; equal schedules have the same one."""
    known: list[Schedule] = []
    numbers: dict[int, int] = {}
    for replica in replicas:
        schedule = replica.schedule
        if id(schedule) not in numbers:
            if schedule not in known:
                known.append(schedule)
            numbers[id(schedule)] = known.index(schedule)
    return numbers


def _in_step(training: Training, replica: Replica) -> bool:
    used = set()
    for m in range(min(replica.schedule.num_micro_batches, max(1, len(replica.schedule.routes)))):
        clusters = [replica.stages[stage].cluster for stage, _ in replica.schedule.route(m)]
        for a, b in itertools.pairwise(clusters):
            used |= {(a, b), (b, a)} if a != b else set()
    wires = [training.wires[ends] for ends in used if ends in training.wires]
    return all(training.sharing == "fair" and not wire.jitter_s for wire in wires)
