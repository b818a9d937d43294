"""`check_adapter`: conformance tests of `Adapter`, for new scheduler adapters.

Short POSIX shell scripts replace the training program; the folder is their last argument.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.agent.adapters.adapter import Adapter, Move, WorkerStatus
from isthmus.core.messages.agent_messages import QueueEntry

MakeAdapter = Callable[[Sequence[str]], Adapter]
"""Factory: takes a worker command (the folder is appended) and returns a new adapter of the same site."""

_NOTE = 'echo started >> "$1/starts"; '
_WAIT = "while :; do sleep 0.02; done"
_STEP_S = 0.01


class ContractError(Exception):
    """An adapter violates the contract of `Adapter`; the message is the violated rule."""


def check_adapter(make: MakeAdapter, folder: Path, *, timeout_s: float = 20.0) -> None:
    """Check every rule, each in its own folder below `folder`; raise `ContractError` on a violation.

    `make` must return adapters of one site with at least one device. `timeout_s` limits each wait for a
    process. All processes have ended on return.
    """
    for rule in _RULES:
        place = folder / rule.__name__
        place.mkdir(parents=True)
        rule(_Site(make, place, timeout_s))


class _Site:
    """Context of one rule: the adapter factory, one worker folder, and wait functions."""

    def __init__(self, make: MakeAdapter, folder: Path, timeout_s: float) -> None:
        self._make, self.folder, self._timeout_s = make, folder, timeout_s

    def adapter(self, program: str = "exit 0") -> Adapter:
        """Return a new adapter whose workers record their start, then run `program`."""
        return self._make(("sh", "-c", _NOTE + program, "stand-in"))

    def wait(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait until `happened()` is true; raise `ContractError` with `what` on timeout."""
        deadline = time.monotonic() + self._timeout_s
        while not happened():
            require(time.monotonic() < deadline, f"{what}, within {self._timeout_s:g} s")
            time.sleep(_STEP_S)

    def ended(self, adapter: Adapter) -> WorkerStatus:
        """Wait until the worker has exited; return its status."""
        self.wait(
            "a worker whose program ended is reported as exited", lambda: self._state(adapter) == "exited"
        )
        return adapter.poll(self.folder)

    def started(self) -> None:
        """Wait until the program has recorded its start."""
        self.wait("a started worker runs its program", lambda: self.starts == 1)

    @property
    def starts(self) -> int:
        """Number of times the program was started."""
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def cards(self, adapter: Adapter) -> Sequence[str]:
        """Return one device of the site, as a list."""
        return [next(iter(adapter.inventory().values()))[0]]

    def _state(self, adapter: Adapter) -> str:
        return adapter.poll(self.folder).state


def require(holds: bool, rule: str) -> None:
    """Raise `ContractError(rule)` unless `holds`."""
    if not holds:
        raise ContractError(rule)


def inventory_is_stable_and_unique(site: _Site) -> None:
    """The inventory lists each device once and never changes."""
    devices = [device for group in site.adapter().inventory().values() for device in group]
    require(len(devices) > 0, "the inventory has at least one device")
    require(len(devices) == len(set(devices)), "the inventory lists each device once")
    again = [device for group in site.adapter().inventory().values() for device in group]
    require(devices == again, "the inventory never changes")


def absent_until_started(site: _Site) -> None:
    """A folder that was not started is `absent`."""
    require(site.adapter().poll(site.folder).state == "absent", "a worker is absent before its start")


def exit_status_is_kept(site: _Site) -> None:
    """Every adapter of the site returns the program's exit status."""
    adapter = site.adapter("exit 7")
    adapter.start(site.folder, site.cards(adapter))
    require(site.ended(adapter).exit_status == 7, "the exit status is the program's")
    require(site.adapter().poll(site.folder).exit_status == 7, "a new adapter returns the same exit status")


def output_is_kept(site: _Site) -> None:
    """Standard output and error go to the folder's `log`."""
    adapter = site.adapter("echo out; echo err >&2")
    adapter.start(site.folder, site.cards(adapter))
    site.ended(adapter)
    require((site.folder / "log").read_text() == "out\nerr\n", "the log has output and error in order")


def cards_are_told_and_tokens_are_not(site: _Site) -> None:
    """The program's environment has its devices in `ISTHMUS_CARDS` and no tokens."""
    adapter = site.adapter('echo "$ISTHMUS_CARDS"; env | grep -c "ISTHMUS_.*TOKEN"')
    devices = site.cards(adapter)
    before = os.environ.get("ISTHMUS_TOKEN")
    os.environ["ISTHMUS_TOKEN"] = "secret"  # noqa: S105 - the worker must not see it
    try:
        adapter.start(site.folder, devices)
        site.ended(adapter)
    finally:
        os.environ.pop("ISTHMUS_TOKEN")
        if before is not None:
            os.environ["ISTHMUS_TOKEN"] = before
    expected = f"{','.join(devices)}\n0\n"
    require((site.folder / "log").read_text() == expected, "the environment has the devices and no tokens")


def started_once(site: _Site) -> None:
    """The program runs once, however often and by however many adapters it is started."""
    adapters = [site.adapter("sleep 0.2") for _ in range(3)]
    for adapter in adapters * 2:
        adapter.start(site.folder, site.cards(adapter))
    for adapter in adapters:
        site.ended(adapter)
        adapter.start(site.folder, site.cards(adapter))
    site.ended(site.adapter())
    require(site.starts == 1, f"a folder is started once, not {site.starts} times")


def command_replaces_the_program(site: _Site) -> None:
    """A command given to `start` runs instead of the site's worker program."""
    adapter = site.adapter()
    adapter.start(site.folder, site.cards(adapter), ("sh", "-c", "exit 5"))
    require(site.ended(adapter).exit_status == 5, "a given command runs")
    require(site.starts == 0, "a given command replaces the program")


def signal_is_told(site: _Site) -> None:
    """A program killed by signal n has status 128 + n."""
    adapter = site.adapter("kill -9 $$")
    adapter.start(site.folder, site.cards(adapter))
    require(site.ended(adapter).exit_status == 128 + 9, "a killed worker has status 137")


def stop_asks_first(site: _Site) -> None:
    """`stop` without force sends SIGTERM, which the program can handle."""
    adapter = site.adapter('trap "exit 3" TERM; echo > "$1/ready"; ' + _WAIT)
    adapter.start(site.folder, site.cards(adapter))
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require(site.ended(adapter).exit_status == 3, "a worker may handle SIGTERM and choose its exit status")


def force_ends_what_will_not(site: _Site) -> None:
    """`stop` with force kills a program that ignores SIGTERM."""
    adapter = site.adapter('trap "" TERM; echo > "$1/ready"; ' + _WAIT)
    adapter.start(site.folder, site.cards(adapter))
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require(adapter.poll(site.folder).state == "running", "a worker that ignores SIGTERM still runs")
    adapter.stop(site.folder, force=True)
    require(site.ended(adapter).exit_status == 128 + 9, "force kills a worker, with status 137")


def stopped_before_never_starts(site: _Site) -> None:
    """A folder stopped before its start never starts."""
    adapter = site.adapter()
    adapter.stop(site.folder, force=False)
    require(adapter.poll(site.folder).state == "exited", "a worker stopped before its start is exited")
    for other in (adapter, site.adapter()):
        other.start(site.folder, site.cards(other))
        site.ended(other)
    require(site.starts == 0, "a worker stopped before its start never starts")


def found_again(site: _Site) -> None:
    """A new adapter finds a running worker and can stop it."""
    first = site.adapter(_WAIT)
    first.start(site.folder, site.cards(first))
    site.started()
    second = site.adapter()
    require(second.poll(site.folder).state == "running", "a new adapter sees a running worker")
    second.stop(site.folder, force=True)
    site.ended(second)
    require(
        site.ended(first).exit_status == second.poll(site.folder).exit_status,
        "both adapters return the same exit status",
    )


def nothing_outlives_the_program(site: _Site) -> None:
    """A worker is exited only after every process that its program started has ended."""
    adapter = site.adapter(f'({_WAIT}) & echo $! > "$1/child"; exit 0')
    adapter.start(site.folder, site.cards(adapter))
    site.ended(adapter)
    child = int((site.folder / "child").read_text())
    require(not runs(child), "an exited worker has no processes")


def queue_is_ordered_by_moves(site: _Site) -> None:
    """Moves insert and reorder in sequence; every adapter of the site sees the result."""
    a, b, c, d = (QueueEntry(job=name, attempt=number) for number, name in enumerate("abcd"))
    queue = site.adapter()
    before = tuple(queue.queue())
    queue.order([Move(entry=a), Move(entry=b, after=a), Move(entry=c)])
    require(_queued(site, before) == [c, a, b], "a move puts its entry directly after another, or first")
    queue.order([Move(entry=c, after=b), Move(entry=d, after=QueueEntry(job="missing"))])
    require(_queued(site, before) == [a, b, c, d], "a move after a missing entry puts its entry last")
    queue.order([Move(entry=b)], gone=[a])
    require(_queued(site, before) == [b, c, d], "entries without a move keep their order")
    queue.order([], gone=[a, b, c, d])
    require(tuple(queue.queue()) == before, "removed entries are not in the queue")


def a_long_queue_is_ordered_quickly(site: _Site) -> None:
    """A thousand moves take at most one second."""
    entries = [QueueEntry(job=f"j{number}", attempt=1) for number in range(1000)]
    queue = site.adapter()
    start_s = time.monotonic()
    queue.order([Move(entry=entry) for entry in entries])
    took_s = time.monotonic() - start_s
    queue.order([], gone=entries)
    require(took_s <= 1, f"a thousand moves take at most one second, not {took_s:.1f} s")


def _queued(site: _Site, before: Sequence[QueueEntry]) -> list[QueueEntry]:
    return [entry for entry in site.adapter().queue() if entry not in before]


def runs(pid: int) -> bool:
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
    cards_are_told_and_tokens_are_not,
    started_once,
    command_replaces_the_program,
    signal_is_told,
    stop_asks_first,
    force_ends_what_will_not,
    stopped_before_never_starts,
    found_again,
    nothing_outlives_the_program,
    queue_is_ordered_by_moves,
    a_long_queue_is_ordered_quickly,
)
