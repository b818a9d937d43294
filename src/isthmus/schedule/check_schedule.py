"""`check_schedule`: checks that a schedule is complete, ordered and free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from isthmus.core.errors import PlanError
from isthmus.schedule.add_communication import require_counts
from isthmus.schedule.operation import Operation, OperationKind, Schedule, StageChunk


def check_schedule(schedule: Schedule) -> tuple[int, ...]:
    """Return the peak number of micro-batches in flight (forward done, backward not), (num_stages,).

    Micro-batches of all chunks of a stage count together; a split backward ends with its `backward_weight`,
    which needs the stage's inputs. Raises `PlanError` with stage, operation and reason unless
    - the counts of stages, micro-batches and chunks are positive, and all routes have the same length;
    - each route consists of existing chunks, and each chunk is the same virtual stage in all routes;
    - each stage executes every operation that its position requires exactly once per micro-batch, and no
      other;
    - each operation follows those that it depends on, and the update follows all backwards;
    - the k-th send between two stages matches the k-th receive;
    - the schedule is free of deadlock, even if a send completes only once its receive is posted (unbuffered).
    """
    require_counts(schedule.num_stages, schedule.num_micro_batches, schedule.num_chunks)
    _check_routes(schedule)
    for stage, (wanted, operations) in enumerate(zip(_required_operations(schedule), schedule.stages, strict=True)):
        _check_complete(stage, wanted, operations)
        _check_order(stage, operations)
    _check_message_order(schedule)
    _check_deadlock(schedule)
    return tuple(_peak_in_flight(operations) for operations in schedule.stages)


def _schedule_error(stage: int, operation: object, reason: str) -> PlanError:
    return PlanError(f"schedule, stage {stage}, {operation}: {reason}")


def _check_routes(schedule: Schedule) -> None:
    places: dict[StageChunk, int] = {}
    for number, route in enumerate(schedule.routes):
        if len(route) != schedule.num_virtual_stages:
            lengths = f"{len(route)} virtual stages, route 0 has {schedule.num_virtual_stages}"
            raise PlanError(f"schedule, route {number}: {lengths}")
        for virtual, (stage, chunk) in enumerate(route):
            if not (0 <= stage < schedule.num_stages and 0 <= chunk < schedule.num_chunks):
                raise PlanError(f"schedule, route {number}: stage {stage} has no chunk {chunk}")
            if places.setdefault((stage, chunk), virtual) != virtual:
                both = f"virtual stages {places[stage, chunk]} and {virtual}"
                raise PlanError(f"schedule, route {number}: chunk {chunk} of stage {stage} holds {both}")


def _required_kinds(schedule: Schedule, virtual: int) -> list[OperationKind]:
    """Return what virtual stage `virtual` executes once per micro-batch; `backward` may be split."""
    first, last = virtual == 0, virtual == schedule.num_virtual_stages - 1
    kinds: list[OperationKind] = ["forward"]
    if not first:
        kinds += ["receive_forward", "wait_receive_forward"]
    if not last:
        kinds += ["send_forward", "wait_send_forward"]
    if not schedule.trains:
        return kinds
    kinds.append("backward")
    if not last:
        kinds += ["receive_backward", "wait_receive_backward"]
    if not first:
        kinds += ["send_backward", "wait_send_backward"]
    return kinds


def _required_operations(schedule: Schedule) -> list[set[Operation]]:
    """Return the required operations of each stage, all backwards unsplit."""
    wanted: list[set[Operation]] = [set() for _ in schedule.stages]
    required = [_required_kinds(schedule, v) for v in range(schedule.num_virtual_stages)]
    for m in range(schedule.num_micro_batches):
        for (stage, chunk), kinds in zip(schedule.route(m), required, strict=True):
            wanted[stage].update(Operation(kind, m, chunk) for kind in kinds)
    if schedule.trains:
        for stage_wanted in wanted:
            stage_wanted.add(Operation("update", 0))
    return wanted


def _check_complete(stage: int, required: set[Operation], operations: Iterable[Operation]) -> None:
    counts = Counter(operations)
    for one in counts:
        if one.kind == "backward_input":
            unsplit = Operation("backward", one.micro_batch, one.chunk)
            if unsplit in required:
                required.discard(unsplit)
                required |= {one, Operation("backward_weight", one.micro_batch, one.chunk)}
    for one in counts:
        if one not in required:
            raise _schedule_error(stage, one, "is unexpected")
        if counts[one] > 1:
            raise _schedule_error(stage, one, f"appears {counts[one]} times")
    for one in required:
        if one not in counts:
            raise _schedule_error(stage, one, "is missing")


_PREDECESSORS: dict[OperationKind, tuple[OperationKind, ...]] = {
    "forward": ("wait_receive_forward",),
    "send_forward": ("forward",),
    "backward": ("forward", "wait_receive_backward"),
    "backward_input": ("forward", "wait_receive_backward"),
    "backward_weight": ("backward_input",),
    "send_backward": ("backward", "backward_input"),
    "wait_send_forward": ("send_forward",),
    "wait_receive_forward": ("receive_forward",),
    "wait_send_backward": ("send_backward",),
    "wait_receive_backward": ("receive_backward",),
}
"""Operations of the same micro-batch and chunk that must precede each kind, if the stage executes them."""


_BACKWARDS = ("backward", "backward_input", "backward_weight")


def _check_order(stage: int, operations: tuple[Operation, ...]) -> None:
    place = {one: index for index, one in enumerate(operations)}
    for one, index in place.items():
        for kind in _PREDECESSORS.get(one.kind, ()):
            earlier = Operation(kind, one.micro_batch, one.chunk)
            if earlier in place and place[earlier] > index:
                raise _schedule_error(stage, one, f"comes before {earlier}")
        if one.kind in _BACKWARDS and place[Operation("update", 0)] < index:
            raise _schedule_error(stage, one, "comes after the update")


TransferKey = tuple[OperationKind, int, int]
"""Key of a transfer, equal at both ends: kind at the sender, micro-batch, virtual stage of the sender."""


def _transfer_key(schedule: Schedule, stage: int, one: Operation) -> TransferKey:
    virtual = schedule.virtual_stage(stage, one)
    if one.kind.endswith("send_forward"):
        return "send_forward", one.micro_batch, virtual
    if one.kind.endswith("send_backward"):
        return "send_backward", one.micro_batch, virtual
    if one.kind.endswith("receive_forward"):
        return "send_forward", one.micro_batch, virtual - 1
    return "send_backward", one.micro_batch, virtual + 1


def _check_message_order(schedule: Schedule) -> None:
    """Raise unless the order of sends from a to b equals the order of receives at b from a."""
    sends: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for stage, one in schedule:
        if one.kind.startswith("send_"):
            sends[stage, schedule.peer_stage(stage, one)].append(one)
        elif one.kind.startswith("receive_"):
            receives[schedule.peer_stage(stage, one), stage].append(one)
    for (source, target), sent in sends.items():
        for out, back in zip(sent, receives[source, target], strict=True):
            if _transfer_key(schedule, source, out) != _transfer_key(schedule, target, back):
                raise _schedule_error(source, out, f"matches {back} of stage {target}, which expects another message")


def _check_deadlock(schedule: Schedule) -> None:
    """Raise if executing the schedule deadlocks: advance every stage until none can move."""
    place = [0] * schedule.num_stages
    sent: set[TransferKey] = set()
    posted: set[TransferKey] = set()
    moved = True
    while moved:
        moved = False
        for stage, operations in enumerate(schedule.stages):
            while place[stage] < len(operations):
                one = operations[place[stage]]
                if one.kind.startswith("wait_send") and _transfer_key(schedule, stage, one) not in posted:
                    break
                if one.kind.startswith("wait_receive") and _transfer_key(schedule, stage, one) not in sent:
                    break
                if one.kind.startswith("send_"):
                    sent.add(_transfer_key(schedule, stage, one))
                elif one.kind.startswith("receive_"):
                    posted.add(_transfer_key(schedule, stage, one))
                place[stage] += 1
                moved = True
    stuck = [s for s, operations in enumerate(schedule.stages) if place[s] < len(operations)]
    if stuck:
        first = stuck[0]
        blocked = "; ".join(f"stage {s} at {schedule.stages[s][place[s]]}" for s in stuck)
        raise _schedule_error(first, schedule.stages[first][place[first]], f"never completes (deadlock: {blocked})")


def _peak_in_flight(operations: Iterable[Operation]) -> int:
    now = peak = 0
    for one in operations:
        now += (one.kind == "forward") - (one.kind in ("backward", "backward_weight"))
        peak = max(peak, now)
    return peak
