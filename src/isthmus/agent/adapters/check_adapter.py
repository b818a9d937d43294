"""`check_adapter`: the contract of `Adapter`, in code. Whoever brings another scheduler runs it.

The stand-ins for the training program are a few lines of POSIX shell; the folder is their last argument.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.agent.adapters.adapter import Adapter, Move, WorkerStatus
from isthmus.core.messages.agent_messages import QueueEntry

MakeAdapter = Callable[[Sequence[str]], Adapter]
"""Given a worker program (the folder comes behind it), return a fresh adapter of the same site."""

_NOTE = 'echo started >> "$1/starts"; '
_WAIT = "while :; do sleep 0.02; done"
_STEP_S = 0.01


class ContractError(Exception):
    """An adapter does not do what `Adapter` says; the message says which rule."""


def check_adapter(make: MakeAdapter, folder: Path, *, timeout_s: float = 20.0) -> None:
    """Run every rule of the contract in folders of their own below `folder`; raise `ContractError`.

    `make` is called with shell programs and must return adapters of one site, with at least one card.
    `timeout_s` bounds each wait for a process. Nothing is left running.
    """
    for rule in _RULES:
        place = folder / rule.__name__
        place.mkdir(parents=True)
        rule(_Site(make, place, timeout_s))


class _Site:
    """The adapter's makers and one worker folder, with waits."""

    def __init__(self, make: MakeAdapter, folder: Path, timeout_s: float) -> None:
        self._make, self.folder, self._timeout_s = make, folder, timeout_s

    def adapter(self, program: str = "exit 0") -> Adapter:
        """Return a fresh adapter whose workers run `program`, after noting that they started."""
        return self._make(("sh", "-c", _NOTE + program, "stand-in"))

    def wait(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait until `happened`."""
        deadline = time.monotonic() + self._timeout_s
        while not happened():
            require(time.monotonic() < deadline, f"{what}, within {self._timeout_s:g} s")
            time.sleep(_STEP_S)

    def ended(self, adapter: Adapter) -> WorkerStatus:
        """Wait until the worker has exited; return its status."""
        self.wait("a worker that ended is seen as exited", lambda: self._state(adapter) == "exited")
        return adapter.poll(self.folder)

    def started(self) -> None:
        """Wait until the program has noted its start."""
        self.wait("a started worker runs its program", lambda: self.starts == 1)

    @property
    def starts(self) -> int:
        """How often the program was started."""
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def cards(self, adapter: Adapter) -> Sequence[str]:
        """Return one card of the site."""
        return [next(iter(adapter.inventory().values()))[0]]

    def _state(self, adapter: Adapter) -> str:
        return adapter.poll(self.folder).state


def require(holds: bool, rule: str) -> None:
    """Raise `ContractError` with `rule` unless it holds."""
    if not holds:
        raise ContractError(rule)


def inventory_is_stable_and_unique(site: _Site) -> None:
    """The inventory names each card once and says the same every time."""
    cards = [card for group in site.adapter().inventory().values() for card in group]
    require(len(cards) > 0, "an inventory has cards")
    require(len(cards) == len(set(cards)), "an inventory names each card once")
    again = [card for group in site.adapter().inventory().values() for card in group]
    require(cards == again, "an inventory is the same every time")


def absent_until_started(site: _Site) -> None:
    """A folder that was not started is `absent`."""
    require(site.adapter().poll(site.folder).state == "absent", "what was not started is absent")


def exit_status_is_kept(site: _Site) -> None:
    """The exit status is that of the program, for every adapter that asks."""
    adapter = site.adapter("exit 7")
    adapter.start(site.folder, site.cards(adapter))
    require(site.ended(adapter).exit_status == 7, "the exit status is the program's")
    require(site.adapter().poll(site.folder).exit_status == 7, "the exit status is found again")


def output_is_kept(site: _Site) -> None:
    """Standard output and error are in the folder's `log`."""
    adapter = site.adapter("echo out; echo err >&2")
    adapter.start(site.folder, site.cards(adapter))
    site.ended(adapter)
    require((site.folder / "log").read_text() == "out\nerr\n", "output and error are in the log, in order")


def cards_are_told_and_tokens_are_not(site: _Site) -> None:
    """The program finds its cards in `ISTHMUS_CARDS`, and no token in its environment."""
    adapter = site.adapter('echo "$ISTHMUS_CARDS"; env | grep -c "ISTHMUS_.*TOKEN"')
    cards = site.cards(adapter)
    before = os.environ.get("ISTHMUS_TOKEN")
    os.environ["ISTHMUS_TOKEN"] = "secret"  # noqa: S105 - the worker must not see it
    try:
        adapter.start(site.folder, cards)
        site.ended(adapter)
    finally:
        os.environ.pop("ISTHMUS_TOKEN")
        if before is not None:
            os.environ["ISTHMUS_TOKEN"] = before
    require((site.folder / "log").read_text() == f"{','.join(cards)}\n0\n", "cards are told, tokens are not")


def started_once(site: _Site) -> None:
    """However often, and by whomever, a folder is started: its program runs once."""
    adapters = [site.adapter("sleep 0.2") for _ in range(3)]
    for adapter in adapters * 2:
        adapter.start(site.folder, site.cards(adapter))
    for adapter in adapters:
        site.ended(adapter)
        adapter.start(site.folder, site.cards(adapter))
    site.ended(site.adapter())
    require(site.starts == 1, f"a folder is started once, this one was {site.starts} times")


def command_replaces_the_program(site: _Site) -> None:
    """A command given to `start` runs instead of the site's worker program."""
    adapter = site.adapter()
    adapter.start(site.folder, site.cards(adapter), ("sh", "-c", "exit 5"))
    require(site.ended(adapter).exit_status == 5, "a given command is run")
    require(site.starts == 0, "a given command replaces the program")


def signal_is_told(site: _Site) -> None:
    """A program ended by signal n has status 128 + n."""
    adapter = site.adapter("kill -9 $$")
    adapter.start(site.folder, site.cards(adapter))
    require(site.ended(adapter).exit_status == 128 + 9, "a killed worker has status 137")


def stop_asks_first(site: _Site) -> None:
    """`stop` without force lets the program end in its own way."""
    adapter = site.adapter('trap "exit 3" TERM; echo > "$1/ready"; ' + _WAIT)
    adapter.start(site.folder, site.cards(adapter))
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require(site.ended(adapter).exit_status == 3, "a worker may end in its own way when asked to stop")


def force_ends_what_will_not(site: _Site) -> None:
    """`stop` with force ends a program that does not listen."""
    adapter = site.adapter('trap "" TERM; echo > "$1/ready"; ' + _WAIT)
    adapter.start(site.folder, site.cards(adapter))
    site.wait("the program is ready", (site.folder / "ready").exists)
    adapter.stop(site.folder, force=False)
    require(adapter.poll(site.folder).state == "running", "a worker that does not listen still runs")
    adapter.stop(site.folder, force=True)
    require(site.ended(adapter).exit_status == 128 + 9, "force ends a worker, with status 137")


def stopped_before_never_starts(site: _Site) -> None:
    """After `stop`, a folder that was never started never will be."""
    adapter = site.adapter()
    adapter.stop(site.folder, force=False)
    require(adapter.poll(site.folder).state == "exited", "what was stopped before its start is exited")
    for other in (adapter, site.adapter()):
        other.start(site.folder, site.cards(other))
        site.ended(other)
    require(site.starts == 0, "what was stopped before its start never starts")


def found_again(site: _Site) -> None:
    """Another adapter finds a running worker, and can end it."""
    first = site.adapter(_WAIT)
    first.start(site.folder, site.cards(first))
    site.started()
    second = site.adapter()
    require(second.poll(site.folder).state == "running", "another adapter sees a running worker")
    second.stop(site.folder, force=True)
    site.ended(second)
    require(site.ended(first).exit_status == second.poll(site.folder).exit_status, "both see one end")


def nothing_outlives_the_program(site: _Site) -> None:
    """A worker is exited only once every process that its program started is gone."""
    adapter = site.adapter(f'({_WAIT}) & echo $! > "$1/child"; exit 0')
    adapter.start(site.folder, site.cards(adapter))
    site.ended(adapter)
    child = int((site.folder / "child").read_text())
    require(not runs(child), "no process of a worker is left when it is exited")


def queue_is_ordered_by_moves(site: _Site) -> None:
    """Moves put in and put elsewhere, one after the other; every adapter of the site sees the result."""
    a, b, c, d = (QueueEntry(job=name, attempt=number) for number, name in enumerate("abcd"))
    queue = site.adapter()
    before = tuple(queue.queue())
    queue.order([Move(entry=a), Move(entry=b, after=a), Move(entry=c)])
    require(_queued(site, before) == [c, a, b], "a move puts its entry directly behind another, or first")
    queue.order([Move(entry=c, after=b), Move(entry=d, after=QueueEntry(job="nobody"))])
    require(_queued(site, before) == [a, b, c, d], "a move behind what is not there puts its entry last")
    queue.order([Move(entry=b)], gone=[a])
    require(_queued(site, before) == [b, c, d], "what is named by no move keeps its place")
    queue.order([], gone=[a, b, c, d])
    require(tuple(queue.queue()) == before, "what is gone is out of the queue")


def a_long_queue_is_ordered_quickly(site: _Site) -> None:
    """A thousand moves take no longer than a second."""
    entries = [QueueEntry(job=f"j{number}", attempt=1) for number in range(1000)]
    queue = site.adapter()
    start_s = time.monotonic()
    queue.order([Move(entry=entry) for entry in entries])
    took_s = time.monotonic() - start_s
    queue.order([], gone=entries)
    require(took_s <= 1, f"a thousand moves take no longer than a second, these took {took_s:.1f} s")


def _queued(site: _Site, before: Sequence[QueueEntry]) -> list[QueueEntry]:
    return [entry for entry in site.adapter().queue() if entry not in before]


def runs(pid: int) -> bool:
    """Tell whether process `pid` runs; one that ended and waits to be reaped does not."""
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
