"""`fold_replicas`: the replicas of a simulation that behave the same, as one."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.sim.simulation_result import SimulationResult, StageResult, TimelineSpan

_TICKS = 1e9
"""Times that agree to this part of the whole run are equal."""


@dataclass(frozen=True, kw_only=True)
class FoldedReplica:
    """Replicas with equal clusters, spans, times and memory; `stages` and `spans` are those of the first."""

    replicas: tuple[int, ...]
    stages: tuple[StageResult, ...]
    spans: tuple[TimelineSpan, ...]

    @property
    def label(self) -> str:
        """The replicas as text: `replica 2`, or `replicas 0-3`, or `replicas 0, 2`."""
        first, last = self.replicas[0], self.replicas[-1]
        if len(self.replicas) == 1:
            return f"replica {first}"
        if last - first + 1 == len(self.replicas):
            return f"replicas {first}-{last}"
        return "replicas " + ", ".join(map(str, self.replicas))


def fold_replicas(run: SimulationResult) -> tuple[FoldedReplica, ...]:
    """Return the replicas of `run`, equal ones once, in the order of their first one.

    The simulator merges equal replicas where that is exact: of these only the first has spans.
    """
    spans: dict[int, list[TimelineSpan]] = {}
    stages: dict[int, list[StageResult]] = {}
    for span in run.spans:
        spans.setdefault(span.replica, []).append(span)
    for stage in run.stages:
        stages.setdefault(stage.replica, []).append(stage)
    groups: dict[tuple[object, ...], list[list[int]]] = {}
    for replica in stages:
        equal = groups.setdefault(_stages_key(stages[replica], run.total_s), [])
        own = _spans_key(spans.get(replica, []), run.total_s)
        for group in equal:
            if not own or own == _spans_key(spans.get(group[0], []), run.total_s):
                group.append(replica)
                break
        else:
            equal.append([replica])
    found = [
        FoldedReplica(replicas=tuple(group), stages=tuple(stages[group[0]]), spans=tuple(spans.get(group[0], ())))
        for equal in groups.values()
        for group in equal
    ]
    return tuple(sorted(found, key=lambda one: one.replicas))


def _ticks(value_s: float, total_s: float) -> int:
    return round(value_s / max(total_s, 1e-12) * _TICKS)


def _stages_key(stages: list[StageResult], total_s: float) -> tuple[object, ...]:
    return tuple(
        (
            one.stage,
            one.cluster,
            _ticks(one.busy_s, total_s),
            _ticks(one.bubble_s, total_s),
            round(one.peak_memory_bytes),
        )
        for one in stages
    )


def _spans_key(spans: list[TimelineSpan], total_s: float) -> tuple[object, ...]:
    return tuple(
        (one.stage, one.kind, one.what, _ticks(one.start_s, total_s), _ticks(one.end_s, total_s)) for one in spans
    )
