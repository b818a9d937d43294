"""The worker's end of the courier: `run_part --ticket FILE [--work DIR]` brings a run folder here and runs its program.

It dials the agent, fetches the folder's files, starts the program through `rank_runner`, carries what the program
writes back, and ends once the agent has its exit status. It needs nothing but Python: the agent can ship it as an
archive (`courier_archive.py`).

    DIR/folder   the run folder: the program's copy
    DIR/hold     `lease` and `released`, on which the runner ends the program
    DIR/lease    the run lease, counted by the clock of this machine
    DIR/courier  what this end keeps for a later process of it

The work folder is private. With `--while-open` the end of standard input ends the part: it has lost its starter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.agent.courier.courier_frames import VERSION, Frame, FrameError
from isthmus.agent.courier.courier_link import CourierLink, read_ticket
from isthmus.agent.courier.folder_client import EXIT, Carry, changed_files
from isthmus.agent.courier.part_program import ENDLESS, PartProgram
from isthmus.agent.courier.work_folder import Work, read_piece, replace_file, replace_paths
from isthmus.core.process.boot_clock import boot_id, boot_time_s

LOOK_S = 0.2
"""Interval at which the folder and the agent are looked at."""
LINGER_S = 45.0
"""How long an ended worker tries to hand over its last files after its lease has ended."""
FIRST_CONTACT_S = 300.0
"""How long a worker that has never reached the agent goes on trying."""

_MAX_BACKOFF_S = 2.0
_REFUSED_STATUS = 3
_CONSUMED = ("keys.json",)


class RefusedError(Exception):
    """Raised when the agent refuses this worker for good."""


class RunPart:
    """Runs one part: `step` is one exchange with the agent."""

    def __init__(
        self, ticket: Mapping[str, Any], work: Work, first_contact_s: float = FIRST_CONTACT_S,
        linger_s: float = LINGER_S,
    ) -> None:  # fmt: skip
        self._ticket, self._work = ticket, work
        self._link: CourierLink | None = None
        self._paths: dict[str, str] = {}
        self.program = PartProgram(work)
        self._hold_text, self._run_until_s, self._next_look_s = "", float("-inf"), 0.0
        self._lease_end_s = boot_time_s() + first_contact_s
        self._linger_s = linger_s
        self._is_complete = self._has_moved = False
        self.lost_starter = False

    def run(self, pause: Callable[[float], object], is_orphan: Callable[[], bool]) -> int:
        """Carry until the agent has everything; return the exit status of this process."""
        backoff_s, rng = LOOK_S, random.SystemRandom()
        while True:
            if is_orphan() and not self.lost_starter:
                self.lost_starter = True
                (self._work.hold / "released").touch()
            try:
                if self._step():
                    return 0
                backoff_s = LOOK_S
            except RefusedError as error:
                sys.stderr.write(f"the agent refused this worker: {str(error)!a}\n")
                (self._work.hold / "released").touch()
                self.program.wait_ended()
                return _REFUSED_STATUS
            except (OSError, FrameError, ssl.SSLError) as error:
                self._drop_link()
                self._work.client.shrink()
                if self._has_no_more_time():
                    sys.stderr.write(f"gave up: {str(error)!a}\n")
                    return 1
                backoff_s = LOOK_S if self._has_moved else min(_MAX_BACKOFF_S, 2 * backoff_s)
                self._has_moved = False
                pause(backoff_s * (1 - rng.random() / 2))
            else:
                pause(LOOK_S)

    def _step(self) -> bool:
        """Bring the agent's files here, start the program, carry its files; return whether all is over."""
        link = self._link or self._dial()
        self._bring(link)
        if self._is_complete:
            self.program.start()
        ended = self.program.has_ended()
        seen: set[str] = set()
        while (carry := self._work.client.next_carry(self._work.file_stats(), ended=ended, later=seen)) is not None:
            seen.add(carry.name)
            self._work.save()
            self._carry(link, carry)
            ended = ended or self.program.has_ended()
            if boot_time_s() >= self._next_look_s:
                self._bring(link)
        self._work.save()
        if ended and (self._work.folder / EXIT).exists() and EXIT in self._work.client.tracked:
            self._remove_consumed(link)  # also of a program that ended before the next look
            if link.ask(Frame("done")).kind != "ended":
                raise FrameError("no end after the exit status")
            self._drop_link()
            return True
        return False

    def _dial(self) -> CourierLink:
        link = CourierLink(self._ticket)
        try:
            hello = {"version": VERSION, "instance": self._work.instance, "host": socket.gethostname()}
            answer = link.ask(Frame("hello", hello))
            if answer.kind == "refused":
                raise RefusedError(answer.text("reason"))
            if answer.kind != "welcome":
                raise FrameError(f"'{answer.kind[:40]}' in answer to 'hello'")
            self._work.client.welcome(answer)
            own = {"folder": self._work.folder, "lease": self._work.lease}
            self._paths = {path: str(own[name]) for path, name in answer.mapping("paths").items() if name in own}
        except BaseException:
            link.close()
            raise
        self._link = link
        return link

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _bring(self, link: CourierLink) -> None:
        """Look at the agent: bring leases and changed files here."""
        asked_s = boot_time_s()
        self._next_look_s = asked_s + 2 * LOOK_S
        listing, work = link.ask(Frame("look")), self._work
        if listing.kind != "listing":
            raise FrameError(f"'{listing.kind[:40]}' in answer to 'look'")
        self._take_leases(listing, asked_s)
        wanted, gone = changed_files(listing, work.installed)
        for name in gone:
            (work.folder / name).unlink(missing_ok=True)
            work.client.drop(name)
            del work.installed[name]
        consumed = self._remove_consumed(link)
        wanted = [one for one in wanted if one[0] not in consumed]
        self._is_complete = True
        for name, stamp, size, mode in wanted:
            if name == EXIT:
                raise RefusedError("it has recorded the end of this worker")
            data = self._fetch(link, name, stamp, size)
            if data is not None:
                work.client.take(name)
                work.installed[name] = stamp
                work.save()
                replace_file(work.folder / name, self._with_own_paths(name, data), mode)
            else:
                self._is_complete = False
        work.save()

    def _remove_consumed(self, link: CourierLink) -> set[str]:
        """Remove at the agent what the program has taken away here; return what it was."""
        work = self._work
        gone = [name for name in _CONSUMED if name in work.installed and not (work.folder / name).exists()]
        removed = {name for name in gone if link.ask(Frame("remove", {"name": name})).kind == "stored"}
        for name in removed:
            del work.installed[name]
        return removed

    def _fetch(self, link: CourierLink, name: str, stamp: str, size: int) -> bytes | None:
        found = bytearray()
        while True:
            answer = link.ask(Frame("fetch", {"name": name, "stamp": stamp, "offset": len(found)}))
            if answer.kind != "data":  # it changes: the next look brings it
                return None
            found += answer.body
            if len(found) >= size:
                return bytes(found)
            if not answer.body:
                return None

    def _with_own_paths(self, name: str, data: bytes) -> bytes:
        """Return a file of JSON with the agent's paths of this folder replaced by those here."""
        if not name.endswith(".json"):
            return data
        with contextlib.suppress(ValueError):
            value = json.loads(data)
            replaced = replace_paths(value, self._paths)
            return data if replaced == value else json.dumps(replaced).encode()
        return data

    def _take_leases(self, listing: Frame, asked_s: float) -> None:
        """Write the leases, counted from when the agent was asked: never longer than the agent grants."""
        left = listing.fields.get("run_left_s")
        if left is not None:
            left_s = listing.seconds("run_left_s")
            until_s = asked_s + left_s
            if until_s > self._run_until_s + 1.0 or left_s <= 0:
                self._run_until_s = until_s
                lease = {"boot": boot_id(), "lease_s": left_s, "until_s": until_s, "written_s": asked_s}
                replace_file(self._work.lease / "lease.json", json.dumps(lease).encode(), 0o644)
        text = listing.text("hold") or ENDLESS
        if listing.fields.get("released") is True:
            (self._work.hold / "released").touch()
            self._lease_end_s = min(self._lease_end_s, asked_s)
        elif text != self._hold_text:
            self._hold_text = text
            with contextlib.suppress(ValueError, IndexError):
                self._lease_end_s = asked_s + float(text.split()[1])
            replace_file(self._work.hold / "lease", text.encode(), 0o600)

    def _carry(self, link: CourierLink, carry: Carry) -> None:
        data, age_s = b"", 0.0
        if carry.kind != "remove":
            try:
                before, data, age_s = read_piece(self._work.folder / carry.name, carry)
            except FileNotFoundError:  # gone since the look, which the next one shows
                return
            if before != carry.tail:
                self._work.client.rewrite(carry.name)
                return
        self._work.client.handle(carry, data, link.ask(carry.frame(data, age_s)))
        self._has_moved = True

    def _has_no_more_time(self) -> bool:
        """Return whether the lease, and the time to hand over what is left, are over."""
        ended = (self._work.hold / "released").exists()
        if ended:
            self._lease_end_s = min(self._lease_end_s, boot_time_s())
        return not self.program.is_running() and boot_time_s() > self._lease_end_s + self._linger_s


def _is_at_end(stream: int) -> bool:
    """Return whether the writing end of a pipe has been closed."""
    ready, _, _ = select.select([stream], [], [], 0)
    return bool(ready) and os.read(stream, 1) == b""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part as the command line says."""
    parser = argparse.ArgumentParser(prog="run_part", description="Run one part of a job for an agent of Isthmus.")
    parser.add_argument("--ticket", required=True, type=Path, help="file with the ticket of the part")
    parser.add_argument("--work", type=Path, help="work folder; by default a new one, removed at the end")
    parser.add_argument("--while-open", action="store_true", help="end the part with standard input")
    parser.add_argument(
        "--first-contact-s", type=float, default=FIRST_CONTACT_S, help="limit of tries to reach the agent"
    )
    parser.add_argument("--linger-s", type=float, default=LINGER_S, help="time to hand over files after the lease")
    chosen = parser.parse_args(arguments)
    try:
        ticket = read_ticket(chosen.ticket)
    except (OSError, ValueError, KeyError, TypeError):
        parser.error(f"{chosen.ticket} is no ticket of the courier")
    work = Work(chosen.work or Path(tempfile.mkdtemp(prefix="isthmus-")))
    part = RunPart(ticket, work, chosen.first_contact_s, chosen.linger_s)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: part.program.signal(received))
    status = part.run(time.sleep, (lambda: _is_at_end(0)) if chosen.while_open else lambda: False)
    if chosen.work is None and not part.program.is_running():
        shutil.rmtree(work.folder.parent, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
