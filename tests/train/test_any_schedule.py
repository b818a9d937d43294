"""Rule: what the checker accepts, the executor runs, and it makes the gradients of one process.

Stages are threads joined in memory. One step is run without an update; loss and gradients are compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.schedule import (
    Operation,
    OperationKind,
    Schedule,
    add_communication,
    check_schedule,
    dualpipe,
    gpipe,
    interleaved,
    make_schedule,
    overlapped,
    peak_receive_buffers,
    zero_bubble,
)
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.pipeline.stage_executor import StageExecutor
from tests.train.small_models import write_config
from tests.train.threads import GroupExchange

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

LAYERS, SAMPLES, LENGTH = 6, 2, 4
Range = tuple[int, int]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models of six layers, by variant."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_config(folder / name, name, num_hidden_layers=LAYERS) for name in ("llama-tied", "qwen3-moe")}


@dataclass
class Outcome:
    """What one step made: loss, gradients by name added up over ranks, receive buffers by rank."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: tuple[int, ...]


def run_step(model: Path, schedule: Schedule, held: Sequence[Sequence[Range]], copies: int = 1) -> Outcome:
    """Run one step of `schedule`; stage `s` has a piece of the layers `held[s][c]` for chunk `c`."""
    groups = [IsthmusGroup(one, ["a"] * len(held)) for one in memory_transports(len(held))]
    ids = torch.randint(0, 61, (schedule.num_micro_batches * SAMPLES, LENGTH + 1), generator=_seeded())
    batches = MicroBatches.split(len(ids), SAMPLES, LENGTH, ids[:, :-1], ids[:, 1:])
    executors = [_executor(model, pieces, group, copies) for pieces, group in zip(held, groups, strict=True)]
    try:
        with ThreadPoolExecutor(len(held)) as pool:
            runs = [pool.submit(one.run, schedule, batches, StepTimer()) for one in executors]
            losses = [run.result(30).loss for run in runs]
    finally:
        for group in groups:
            group.shutdown()
    gradients: dict[str, torch.Tensor] = {}
    for executor in executors:
        for name, parameter in executor.model_chunks.global_named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad
    buffers = tuple(one.buffers.num_allocated for one in executors)
    return Outcome(sum(filter(None, losses)), gradients, buffers)


def _executor(model: Path, pieces: Sequence[Range], group: IsthmusGroup, copies: int) -> StageExecutor:
    made = [
        build_stage(model, layers, dtype=torch.float32, device="cpu", seed=1, weights="random") for layers in pieces
    ]
    exchange = GroupExchange("a" * group.size(), group)
    return StageExecutor(ModelChunks(made, copies), group.rank(), range(group.size()), exchange, dtype=torch.float32)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@cache
def alone(model: Path, num_micro_batches: int) -> Outcome:
    """Return the step of one process."""
    return run_step(model, gpipe(1, num_micro_batches), [[(0, LAYERS)]])


def agree(outcome: Outcome, schedule: Schedule, model: Path) -> None:
    """Loss and gradients are those of one process, and no stage received into more places than it may."""
    expected = alone(model, schedule.num_micro_batches)
    assert outcome.loss == pytest.approx(expected.loss, rel=1e-6)
    assert outcome.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(outcome.gradients[name], gradient, rtol=1e-4, atol=1e-5 * scale)
    limits = peak_receive_buffers(schedule)
    assert all(used <= limit for used, limit in zip(outcome.buffers, limits, strict=True))


@dataclass
class Case:
    """A schedule, and which layers its stages hold."""

    schedule: Schedule
    held: list[list[Range]]
    copies: int = 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a kind of schedule, stages, micro-batches, memory (warm-up, receives ahead) and a split."""
    kind = draw(st.sampled_from(["1f1b", "gpipe", "overlapped", "zero_bubble", "interleaved", "dualpipe"]))
    stages = draw(st.sampled_from([2, 4]) if kind == "dualpipe" else st.integers(1, 3))
    chunks = draw(st.integers(1, 2)) if kind == "interleaved" else 1
    count, ahead = draw(st.integers(1, 7)), draw(st.integers(0, 2))
    cuts = stages * chunks - 1
    inner = draw(st.lists(st.integers(1, LAYERS - 1), min_size=cuts, max_size=cuts, unique=True))
    ends = [0, *sorted(inner), LAYERS]
    ranges = list(itertools.pairwise(ends))
    held = [ranges[stage::stages] for stage in range(stages)]
    match kind:
        case "overlapped":
            warm_up = sorted(draw(st.lists(st.integers(0, 6), min_size=stages, max_size=stages)), reverse=True)
            return Case(overlapped(stages, count, warm_up, ahead), held)
        case "zero_bubble":
            return Case(zero_bubble(stages, count, ahead), held)
        case "interleaved":
            return Case(interleaved(stages, count, chunks, ahead), held)
        case "dualpipe":
            both = [[*a, *b] for a, b in zip(held, reversed(held), strict=True)]
            return Case(dualpipe(stages, 2 * stages + 2 * (count % 2), ahead), both, 2)
        case _:
            return Case(make_schedule(kind, stages, count), held)


@st.composite
def orders_of_nobody(draw: st.DrawFn) -> Case:
    """Draw pieces that lie anywhere, and of all orders in which they can be computed any."""
    stages = draw(st.integers(1, 3))
    more = draw(st.lists(st.integers(0, stages - 1), max_size=2))
    places = draw(st.permutations([*range(stages), *more]))
    route = tuple((stage, places[:virtual].count(stage)) for virtual, stage in enumerate(places))
    inner = st.integers(1, LAYERS - 1)
    cuts = sorted(draw(st.lists(inner, min_size=len(route) - 1, max_size=len(route) - 1, unique=True)))
    ranges = list(itertools.pairwise([0, *cuts, LAYERS]))
    held = [[ranges[v] for v, place in enumerate(places) if place == stage] for stage in range(stages)]
    count = draw(st.integers(1, 4))
    orders = _orders(route, count, stages, draw(st.randoms(use_true_random=False)))
    computing = Schedule("odd", count, orders, max(map(len, held)), routes=(route,))
    return Case(add_communication(computing, draw(st.integers(0, 2))), held)


def _orders(
    route: Sequence[tuple[int, int]], count: int, stages: int, chance: random.Random
) -> tuple[tuple[Operation, ...], ...]:
    """Return what each stage computes: again and again any operation whose input is there.

    Any backward may be cut in two.
    """
    orders: list[list[Operation]] = [[] for _ in range(stages)]
    ready: list[tuple[OperationKind, int, int]] = [("forward", m, 0) for m in range(count)]
    while ready:
        kind, m, virtual = ready.pop(chance.randrange(len(ready)))
        stage, chunk = route[virtual]
        orders[stage].append(Operation(kind, m, chunk))
        back: OperationKind = chance.choice(("backward", "backward_input"))
        if kind == "backward_input":
            ready.append(("backward_weight", m, virtual))
        if kind == "forward":
            last = virtual == len(route) - 1
            ready.append((back, m, virtual) if last else ("forward", m, virtual + 1))
        elif kind != "backward_weight" and virtual > 0:
            ready.append((back, m, virtual - 1))
    return tuple(map(tuple, orders))


variants = st.sampled_from(["llama-tied", "qwen3-moe"])


@given(case=cases() | orders_of_nobody(), variant=variants)
@settings(max_examples=8, deadline=None)
def test_any_schedule_makes_the_gradients_of_one_process(models: dict[str, Path], case: Case, variant: str) -> None:
    """Random schedules, splits and memory: accepted, run to the end, exact, and within their buffers."""
    check_schedule(case.schedule)
    outcome = run_step(models[variant], case.schedule, case.held, case.copies)
    agree(outcome, case.schedule, models[variant])


@pytest.mark.slow
def test_many_schedules_do(models: dict[str, Path], whole: bool) -> None:
    """The same, for many more."""

    @given(case=cases() | orders_of_nobody(), variant=variants)
    @settings(max_examples=100 if whole else 40, deadline=None)
    def rule(case: Case, variant: str) -> None:
        check_schedule(case.schedule)
        outcome = run_step(models[variant], case.schedule, case.held, case.copies)
        agree(outcome, case.schedule, models[variant])

    rule()


def test_a_stage_may_hold_neighbours(models: dict[str, Path]) -> None:
    """A zig-zag of two chunks: the stage in the bend hands over to itself, both ways."""
    route = ((0, 0), (1, 0), (1, 1), (0, 1))
    order = [
        one
        for m in range(2)
        for one in (
            *(Operation("forward", m, chunk) for chunk in (0, 1)),
            *(Operation("backward", m, chunk) for chunk in (1, 0)),
        )
    ]
    schedule = add_communication(Schedule("v", 2, (tuple(order),) * 2, 2, routes=(route,)))
    check_schedule(schedule)
    for variant in models:
        outcome = run_step(models[variant], schedule, [[(0, 1), (4, 6)], [(1, 3), (3, 4)]])
        agree(outcome, schedule, models[variant])
