"""`check_adapter`: conformance tests of `SchedulerAdapter`, for new scheduler adapters.

Short POSIX shell scripts replace the training program; the folder is their last argument.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import QueueMove, SchedulerAdapter, WorkerStatus
from isthmus.core.messages.agent_messages import QueueEntry
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerLimits

MakeAdapter = Callable[[Sequence[str]], SchedulerAdapter]
"""Factory: takes a worker command (the folder is appended) and returns a new adapter of the same site."""

_RECORD_START = 'echo started >> "$1/starts"; '
_LOOP_FOREVER = "while :; do sleep 0.02; done"
_POLL_S = 0.01


class ContractError(Exception):
    """An adapter violates the contract of `SchedulerAdapter`; the message is the violated rule."""


def check_adapter(make: MakeAdapter, folder: Path, *, timeout_s: float = 20.0) -> None:
    """Check every rule, each in its own folder below `folder`; raise `ContractError` on a violation.

    `make` must return adapters of one site with at least one device. `timeout_s` limits each wait for a
    process. All processes have ended on return.
    """
    for rule in _RULES:
        place = folder / rule.__name__
        place.mkdir(parents=True)
        rule(_RuleContext(make, place, timeout_s))


class _RuleContext:
    """Context of one rule: the adapter factory, one worker folder, and wait functions."""

    def __init__(self, make: MakeAdapter, folder: Path, timeout_s: float) -> None:
        self._make, self.folder, self._timeout_s = make, folder, timeout_s

    def adapter(self, program: str = "exit 0") -> SchedulerAdapter:
        """Return a new adapter whose workers record their start, then run `program`."""
        return self._make(("sh", "-c", _RECORD_START + program, "stand-in"))

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true; raise `ContractError` with `what` on timeout."""
        deadline = time.monotonic() + self._timeout_s
        while not condition():
            require_rule(time.monotonic() < deadline, f"{what}, within {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def wait_exited(self, adapter: SchedulerAdapter) -> WorkerStatus:
        """Wait until the worker has exited; return its status."""
        self.wait("a worker whose program ended is reported as exited", lambda: self._state(adapter) == "exited")
        return adapter.poll(self.folder)

    def wait_started(self) -> None:
        """Wait until the program has recorded its start."""
        self.wait("a started worker runs its program", lambda: self.num_starts == 1)

    @property
    def num_starts(self) -> int:
        """Number of times the program was started."""
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def one_device(self, adapter: SchedulerAdapter) -> Sequence[str]:
        """Return one device of the site, as a list."""
        return [next(iter(adapter.inventory().values()))[0]]

    def _state(self, adapter: SchedulerAdapter) -> str:
        return adapter.poll(self.folder).state


def require_rule(holds: bool, rule: str) -> None:
    """Raise `ContractError(rule)` unless `holds`."""
    if not holds:
        raise ContractError(rule)


def inventory_is_stable_and_unique(site: _RuleContext) -> None:
    """The inventory lists each device once and never changes."""
    devices = [device for group in site.adapter().inventory().values() for device in group]
    require_rule(len(devices) > 0, "the inventory has at least one device")
    require_rule(len(devices) == len(set(devices)), "the inventory lists each device once")
    again = [device for group in site.adapter().inventory().values() for device in group]
    require_rule(devices == again, "the inventory never changes")


def absent_until_started(site: _RuleContext) -> None:
    """A folder that was not started is `absent`."""
    require_rule(site.adapter().poll(site.folder).state == "absent", "a worker is absent before its start")


def exit_status_is_kept(site: _RuleContext) -> None:
    """Every adapter of the site returns the program's exit status."""
    adapter = site.adapter("exit 7")
    adapter.start(site.folder, site.one_device(adapter))
    require_rule(site.wait_exited(adapter).exit_status == 7, "the exit status is the program's")
    require_rule(site.adapter().poll(site.folder).exit_status == 7, "a new adapter returns the same exit status")


def output_is_kept(site: _RuleContext) -> None:
    """Standard output and error go to the folder's `log`."""
    adapter = site.adapter("echo out; echo err >&2")
    adapter.start(site.folder, site.one_device(adapter))
    site.wait_exited(adapter)
    require_rule((site.folder / "log").read_text() == "out\nerr\n", "the log has output and error in order")


def environment_has_devices_without_tokens(site: _RuleContext) -> None:
    """The program's environment has its devices in `ISTHMUS_CARDS` and no tokens."""
    adapter = site.adapter('echo "$ISTHMUS_CARDS"; env | grep -c "ISTHMUS_.*TOKEN"')
    devices = site.one_device(adapter)
    before = os.environ.get("ISTHMUS_TOKEN")
    os.environ["ISTHMUS_TOKEN"] = "secret"  # noqa: S105 - the worker must not see it
    try:
        adapter.start(site.folder, devices)
        site.wait_exited(adapter)
    finally:
        os.environ.pop("ISTHMUS_TOKEN")
        if before is not None:
            os.environ["ISTHMUS_TOKEN"] = before
    expected = f"{','.join(devices)}\n0\n"
    require_rule((site.folder / "log").read_text() == expected, "the environment has the devices and no tokens")


def limits_are_applied(site: _RuleContext) -> None:
    """The program has the limits of its folder: here the umask and, on Linux, no new privileges."""
    WorkerFolder(site.folder).write_limits(WorkerLimits(umask="0027"))
    adapter = site.adapter('umask; grep -s NoNewPrivs: /proc/self/status || echo "NoNewPrivs: 1"')
    adapter.start(site.folder, site.one_device(adapter))
    site.wait_exited(adapter)
    words = (site.folder / "log").read_text().split()
    require_rule(words == ["0027", "NoNewPrivs:", "1"], "a program starts with the limits of its folder")


def starts_at_most_once(site: _RuleContext) -> None:
    """The program runs once, however often and by however many adapters it is started."""
    adapters = [site.adapter("sleep 0.2") for _ in range(3)]
    for adapter in adapters * 2:
        adapter.start(site.folder, site.one_device(adapter))
    for adapter in adapters:
        site.wait_exited(adapter)
        adapter.start(site.folder, site.one_device(adapter))
    site.wait_exited(site.adapter())
    require_rule(site.num_starts == 1, f"a folder is started once, not {site.num_starts} times")


def command_replaces_the_program(site: _RuleContext) -> None:
    """A command given to `start` runs instead of the site's worker program."""
    adapter = site.adapter()
    adapter.start(site.folder, site.one_device(adapter), ("sh", "-c", "exit 5"))
    require_rule(site.wait_exited(adapter).exit_status == 5, "a given command runs")
    require_rule(site.num_starts == 0, "a given command replaces the program")


def signal_sets_exit_status(site: _RuleContext) -> None:
    """A program killed by signal n has status 128 + n."""
    adapter = site.adapter("kill -9 $$")
    adapter.start(site.folder, site.one_device(adapter))
    require_rule(site.wait_exited(adapter).exit_status == 128 + 9, "a killed worker has status 137")


def stop_sends_sigterm(site: _RuleContext) -> None:
    """`stop` without force sends SIGTERM, which the program can handle."""
    adapter = site.adapter('trap "exit 3" TERM; echo > "$1/ready"; ' + _LOOP_FOREVER)
    adapter.start(site.folder, site.one_device(adapter))
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require_rule(site.wait_exited(adapter).exit_status == 3, "a worker may handle SIGTERM and choose its exit status")


def force_sends_sigkill(site: _RuleContext) -> None:
    """`stop` with force kills a program that ignores SIGTERM."""
    adapter = site.adapter('trap "" TERM; echo > "$1/ready"; ' + _LOOP_FOREVER)
    adapter.start(site.folder, site.one_device(adapter))
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require_rule(adapter.poll(site.folder).state == "running", "a worker that ignores SIGTERM still runs")
    adapter.stop(site.folder, force=True)
    require_rule(site.wait_exited(adapter).exit_status == 128 + 9, "force kills a worker, with status 137")


def stop_prevents_start(site: _RuleContext) -> None:
    """A folder stopped before its start never starts."""
    adapter = site.adapter()
    adapter.stop(site.folder, force=False)
    require_rule(adapter.poll(site.folder).state == "exited", "a worker stopped before its start is exited")
    for other in (adapter, site.adapter()):
        other.start(site.folder, site.one_device(other))
        site.wait_exited(other)
    require_rule(site.num_starts == 0, "a worker stopped before its start never starts")


def new_adapter_finds_worker(site: _RuleContext) -> None:
    """A new adapter finds a running worker and can stop it."""
    first = site.adapter(_LOOP_FOREVER)
    first.start(site.folder, site.one_device(first))
    site.wait_started()
    second = site.adapter()
    require_rule(second.poll(site.folder).state == "running", "a new adapter sees a running worker")
    second.stop(site.folder, force=True)
    site.wait_exited(second)
    require_rule(
        site.wait_exited(first).exit_status == second.poll(site.folder).exit_status,
        "both adapters return the same exit status",
    )


def exit_leaves_no_processes(site: _RuleContext) -> None:
    """A worker is exited only after every process that its program started has ended."""
    adapter = site.adapter(f'({_LOOP_FOREVER}) & echo $! > "$1/child"; exit 0')
    adapter.start(site.folder, site.one_device(adapter))
    site.wait_exited(adapter)
    child = int((site.folder / "child").read_text())
    require_rule(not is_running(child), "an exited worker has no processes")


def queue_is_ordered_by_moves(site: _RuleContext) -> None:
    """Moves insert and reorder in sequence; every adapter of the site sees the result."""
    a, b, c, d = (QueueEntry(job=name, attempt=number) for number, name in enumerate("abcd"))
    queue = site.adapter()
    before = tuple(queue.read_queue())
    queue.reorder_queue([QueueMove(entry=a), QueueMove(entry=b, after=a), QueueMove(entry=c)])
    require_rule(_queued(site, before) == [c, a, b], "a move puts its entry directly after another, or first")
    queue.reorder_queue([QueueMove(entry=c, after=b), QueueMove(entry=d, after=QueueEntry(job="missing"))])
    require_rule(_queued(site, before) == [a, b, c, d], "a move after a missing entry puts its entry last")
    queue.reorder_queue([QueueMove(entry=b)], removed=[a])
    require_rule(_queued(site, before) == [b, c, d], "entries without a move keep their order")
    queue.reorder_queue([], removed=[a, b, c, d])
    require_rule(tuple(queue.read_queue()) == before, "removed entries are not in the queue")


def long_queue_is_reordered_quickly(site: _RuleContext) -> None:
    """A thousand moves take at most one second."""
    entries = [QueueEntry(job=f"j{number}", attempt=1) for number in range(1000)]
    queue = site.adapter()
    start_s = time.monotonic()
    queue.reorder_queue([QueueMove(entry=entry) for entry in entries])
    took_s = time.monotonic() - start_s
    queue.reorder_queue([], removed=entries)
    require_rule(took_s <= 1, f"a thousand moves take at most one second, not {took_s:.1f} s")


def _queued(site: _RuleContext, before: Sequence[QueueEntry]) -> list[QueueEntry]:
    return [entry for entry in site.adapter().read_queue() if entry not in before]


def is_running(pid: int) -> bool:
    """Return whether process `pid` runs; zombies do not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


_RULES = (
    inventory_is_stable_and_unique,
    absent_until_started,
    exit_status_is_kept,
    output_is_kept,
    environment_has_devices_without_tokens,
    limits_are_applied,
    starts_at_most_once,
    command_replaces_the_program,
    signal_sets_exit_status,
    stop_sends_sigterm,
    force_sends_sigkill,
    stop_prevents_start,
    new_adapter_finds_worker,
    exit_leaves_no_processes,
    queue_is_ordered_by_moves,
    long_queue_is_reordered_quickly,
)
