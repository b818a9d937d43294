"""`grid_of`: a plan as a rank grid, with equal replicas and the same degrees in all stages.

Megatron-LM and torchtitan start the same program on every rank and derive its position from one set of
degrees. A plan fits if all replicas have the same layer split and all stages the same degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from isthmus.core.plan import Plan, Stage
from isthmus.plan.export.obstacle import Obstacle

_DEGREES = ("tp", "cp", "ep", "sp")
_UNLIKE = "run it with the Isthmus runtime, or plan again with equal replicas (`isthmus plan --tp --pp --dp`)"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Degrees of parallelism, and `parts[chunk][stage]`: the number of decoder layers of each model chunk.

    A rank is `((stage * dp + replica) * cp + i) * tp + j`: tensor parallelism varies fastest, stages slowest.
    """

    pp: int
    dp: int
    tp: int
    cp: int
    ep: int
    sp: bool
    parts: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        """Number of model chunks per stage."""
        return len(self.parts)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp * self.cp


def grid_of(plan: Plan) -> Grid:
    """Return the rank grid of a plan without `grid_obstacles`."""
    stages = plan.pipeline()
    first = stages[0]
    return Grid(
        pp=len(stages),
        dp=plan.dp,
        tp=first.tp,
        cp=first.cp,
        ep=first.ep,
        sp=first.sp and first.tp > 1,
        parts=tuple(zip(*(tuple(b - a for a, b in pieces) for pieces in plan.pieces()), strict=True)),
    )


def grid_obstacles(plan: Plan) -> Iterator[Obstacle]:
    """Yield the properties of a plan that do not fit a rank grid, independent of the framework."""
    splits = [tuple(stage.num_layers for stage in plan.pipeline(replica)) for replica in range(plan.dp)]
    different = next((replica for replica in range(plan.dp) if splits[replica] != splits[0]), None)
    if different is not None:
        a, b = (", ".join(map(str, splits[replica])) for replica in (0, different))
        yield Obstacle(
            f"replicas differ: replica 0 has stages of {a} layers, replica {different} of {b}", _UNLIKE
        )
    for name in _DEGREES:
        yield from _differing(plan, name, lambda stage, name=name: getattr(stage, name))  # type: ignore[misc]
    if len(set(plan.replica_micro_batches)) > 1:
        counts = ", ".join(map(str, plan.replica_micro_batches))
        yield Obstacle(f"replicas process {counts} micro-batches: the numbers must be equal", _UNLIKE)
    if len(set(plan.replica_micro_batch_sizes)) > 1:
        sizes = ", ".join(map(str, plan.replica_micro_batch_sizes))
        yield Obstacle(f"replicas have micro-batches of {sizes} samples: the sizes must be equal", _UNLIKE)
    if plan.warm_up:
        yield Obstacle(
            f"a custom warm-up ({', '.join(map(str, plan.warm_up))})",
            "plan with --schedule 1f1b, whose warm-up is fixed",
        )
    small = min(stage.num_layers for stage in plan.stages)
    chunks = plan.num_chunks or 1
    if chunks > small:
        yield Obstacle(
            f"a stage of {small} layers cannot be split into {chunks} chunks",
            "set chunks to 1, or give the stage more layers",
        )


def local_steps_obstacles(plan: Plan, lacking: str) -> Iterator[Obstacle]:
    """Yield local steps as an incompatibility, with the reason `lacking` of the framework."""
    if plan.local_steps > 1:
        yield Obstacle(
            f"replicas average their parameters every {plan.local_steps} steps: {lacking}",
            "plan again with training.local_steps 1",
        )


def interleaving_obstacles(plan: Plan) -> Iterator[Obstacle]:
    """Yield incomplete micro-batch groups, which the frameworks' interleaved schedules order differently."""
    pp = len(plan.pipeline())
    if (plan.num_chunks or 1) > 1 and plan.micro_batches % pp:
        yield Obstacle(
            f"{plan.micro_batches} micro-batches do not fill groups of {pp} stages, "
            "and the framework would order the rest differently",
            f"use a multiple of {pp} micro-batches",
        )


def _differing(plan: Plan, name: str, value: Callable[[Stage], object]) -> Iterator[Obstacle]:
    first = plan.stages[0]
    for replica in range(plan.dp):
        for number, stage in enumerate(plan.pipeline(replica)):
            if value(stage) != value(first):
                yield Obstacle(
                    f"{name} differs by stage: {value(first)} in stage 0 of replica 0, "
                    f"{value(stage)} in stage {number} of replica {replica}",
                    f"plan again with one {name} for all stages"
                    + (" (`isthmus plan --tp`)" if name == "tp" else ""),
                )
                return
