"""`make_schedule`: schedules by name; and the schedules with blocking communication, `1f1b` and `gpipe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from isthmus.core.errors import PlanError
from isthmus.schedule.add_communication import require_counts
from isthmus.schedule.dualpipe import dualpipe
from isthmus.schedule.interleaved import interleaved
from isthmus.schedule.operation import WAIT_OF, Operation, OperationKind, Schedule
from isthmus.schedule.overlapped import overlapped
from isthmus.schedule.searched.order_text import schedule_of_text
from isthmus.schedule.zero_bubble import zero_bubble


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the 1F1B schedule with blocking communication, as Megatron-LM runs it.

    Stage `s` warms up with `min(num_stages - s - 1, num_micro_batches)` forwards. In the steady state it
    starts the send to and the receive from a neighbour together and waits for both, which avoids deadlock.
    Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021,
    section 2.2.
    """
    require_counts(num_stages, num_micro_batches)
    stages = tuple(
        tuple(
            _one_f_one_b_stage(
                _StageCommunication(s, num_stages),
                min(num_stages - s - 1, num_micro_batches),
                num_micro_batches,
            )
        )
        for s in range(num_stages)
    )
    return Schedule("1f1b", num_micro_batches, stages)


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the GPipe schedule: all forwards, then all backwards in the same order, blocking communication.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019.
    """
    require_counts(num_stages, num_micro_batches)
    stages = []
    for s in range(num_stages):
        ends = _StageCommunication(s, num_stages)
        forwards = (one for m in range(num_micro_batches) for one in ends.forward_with_exchanges(m))
        backwards = (one for m in range(num_micro_batches) for one in ends.backward_with_exchanges(m))
        stages.append((*forwards, *backwards, Operation("update", 0)))
    return Schedule("gpipe", num_micro_batches, tuple(stages))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "dualpipe": dualpipe,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "overlapped": overlapped,
    "zero_bubble": zero_bubble,
}
"""Schedules by name: `f(num_stages, num_micro_batches) -> Schedule`; some take further keyword arguments."""

SEARCHED = "searched"
"""Name of a schedule that was made for its pipeline by `search_schedule`; it is given by its orders."""


def make_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    warm_up: Sequence[int] = (),
    num_chunks: int | None = None,
    orders: Sequence[str] = (),
) -> Schedule:
    """Return the schedule called `name`.

    Only `overlapped` accepts `warm_up` (forwards by stage), and only `interleaved` and `searched` accept `num_chunks`
    (model chunks per stage); both are optional. `searched` needs `orders`, the text of each stage's computations.
    Raises `PlanError` for an unknown name, a count below 1, or an argument that the schedule does not accept.
    """
    if name not in SCHEDULES and name != SEARCHED:
        raise PlanError(f"unknown schedule '{name}'", hint="known: " + ", ".join(sorted([*SCHEDULES, SEARCHED])))
    if warm_up and name != "overlapped":
        raise PlanError(f"schedule '{name}' does not accept warm_up", hint="remove `warm_up`")
    if name == SEARCHED:
        return _searched(num_stages, num_micro_batches, num_chunks or 1, orders)
    if orders:
        raise PlanError(f"schedule '{name}' does not accept orders", hint="remove `orders`, or set schedule: searched")
    if num_chunks is not None and name != "interleaved":
        raise PlanError(f"schedule '{name}' does not accept chunks", hint="remove `chunks`")
    if warm_up:
        return overlapped(num_stages, num_micro_batches, warm_up)
    if num_chunks is not None:
        return interleaved(num_stages, num_micro_batches, num_chunks)
    return SCHEDULES[name](num_stages, num_micro_batches)


def _searched(num_stages: int, num_micro_batches: int, num_chunks: int, orders: Sequence[str]) -> Schedule:
    if not orders:
        raise PlanError(
            "schedule 'searched' without orders",
            hint="`isthmus plan --schedule searched` makes plans with them, `isthmus simulate --schedule searched "
            "--save FILE` adds them to a plan",
        )
    if len(orders) != num_stages:
        raise PlanError(
            f"orders of {len(orders)} stages for {num_stages} stages", hint="make the plan again with `isthmus plan`"
        )
    return schedule_of_text(orders, num_micro_batches, num_chunks)


class _StageCommunication:
    """Operations of one stage; the first and the last stage omit communication beyond the pipeline's ends."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1

    def exchange(self, *pairs: tuple[OperationKind, int]) -> list[Operation]:
        """Return operations that start all transfers, (kind, micro_batch) pairs, then wait for each."""
        kept = [Operation(kind, m) for kind, m in pairs if not self._is_omitted(kind)]
        return kept + [Operation(WAIT_OF[one.kind], one.micro_batch) for one in kept]

    def forward_with_exchanges(self, m: int) -> list[Operation]:
        """Receive, compute, send."""
        return [
            *self.exchange(("receive_forward", m)),
            Operation("forward", m),
            *self.exchange(("send_forward", m)),
        ]

    def backward_with_exchanges(self, m: int) -> list[Operation]:
        """Receive, compute, send."""
        return [
            *self.exchange(("receive_backward", m)),
            Operation("backward", m),
            *self.exchange(("send_backward", m)),
        ]

    def _is_omitted(self, kind: OperationKind) -> bool:
        before = kind in ("receive_forward", "send_backward")
        return self.is_first if before else self.is_last


def _one_f_one_b_stage(communication: _StageCommunication, warm_up: int, num_micro_batches: int) -> Iterator[Operation]:
    steady = num_micro_batches - warm_up
    for m in range(warm_up):
        yield from communication.forward_with_exchanges(m)
    if steady:
        yield from communication.exchange(("receive_forward", warm_up))
    for i in range(steady):
        yield Operation("forward", warm_up + i)
        yield from communication.exchange(("send_forward", warm_up + i), ("receive_backward", i))
        yield Operation("backward", i)
        if i + 1 < steady:
            yield from communication.exchange(("send_backward", i), ("receive_forward", warm_up + i + 1))
        else:
            yield from communication.exchange(("send_backward", i))
    for m in range(steady, num_micro_batches):
        yield from communication.backward_with_exchanges(m)
    yield Operation("update", 0)
