"""The planner in a process of its own, so that a long search delays no request and can be ended.

`python -m isthmus.control.service.planner_process` answers a line of JSON on standard input, a request, by
one on standard output: `{"plans": ...}`, or `{"error": ...}` where the job cannot be planned. It ends when
its input does, in the middle of a search too, so it outlives no server. Its errors go to the server's log.
"""

from __future__ import annotations

import os
import queue
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence

from isthmus.control.placement import PlanRequest, propose
from isthmus.core.base import Frozen
from isthmus.core.errors import IsthmusError, PlanError
from isthmus.core.plan import PlanSet

PLANNING_LIMIT_S = 120.0
"""How long one search may take; other jobs wait for it meanwhile."""

MEMORY_LIMIT_BYTES = 4 * 2**30
"""How much address space one search may use."""

COMMAND = (sys.executable, "-m", "isthmus.control.service.planner_process")
_NICE = 5


class Answer(Frozen):
    """What it found, or why it could not work on the job."""

    plans: PlanSet | None = None
    error: str = ""


class PlanningEndedError(IsthmusError):
    """The server is ending: there is no answer, and the next server asks again."""


class PlannerProcess:
    """`propose` with a process behind it, started at the first call; one search at a time.

    Raises `PlanError` where the job cannot be planned, the search takes longer than `limit_s` or its process
    dies; the next call then has a new one.
    """

    def __init__(self, *, limit_s: float = PLANNING_LIMIT_S, command: Sequence[str] = COMMAND) -> None:
        self._limit_s, self._command = limit_s, tuple(command)
        self._one_search, self._changing = threading.Lock(), threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._closed = False

    def __call__(self, request: PlanRequest) -> PlanSet:
        """Return candidate plans; see `isthmus.control.placement.propose`."""
        with self._one_search:
            line, late = self._ask(request.model_dump_json(by_alias=True))
            if not line:
                self._discard()
        if self._closed:
            raise PlanningEndedError("the server is ending")
        if not line:
            what = f"took longer than {self._limit_s:g} s" if late else "broke off: its process was ended"
            raise PlanError(
                f"the search for plans {what}", hint="narrow the job's placement, or submit it again"
            )
        answer = Answer.model_validate_json(line)
        if answer.plans is None:
            raise PlanError(answer.error)
        return answer.plans

    def close(self) -> None:
        """End the process, in the middle of a search too; no call has an answer from then on."""
        self._closed = True
        self._discard()

    def _discard(self) -> None:
        with self._changing:
            child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _ask(self, line: str) -> tuple[str, bool]:
        """Return the process's answer, "" where it gave none, and whether it was too late."""
        child = self._running()
        if child is None or child.stdin is None or child.stdout is None:
            return "", False
        late = threading.Event()

        def give_up() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(self._limit_s, give_up)
        timer.start()
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            return answer if answer.endswith("\n") else "", late.is_set()
        except (OSError, ValueError):
            return "", late.is_set()
        finally:
            timer.cancel()

    def _running(self) -> subprocess.Popen[str] | None:
        with self._changing:
            if self._closed:
                return None
            if self._child is not None and self._child.poll() is None:
                return self._child
            if self._child is not None:
                _end(self._child)
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the server, which ends its planner
            )
            return self._child


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue


def answer_to(line: str) -> Answer:
    """Return what `propose` says to a request; a bug of it is logged and told in one line."""
    try:
        return Answer(plans=propose(PlanRequest.model_validate_json(line)))
    except IsthmusError as error:
        return Answer(error=str(error))
    except Exception as error:
        traceback.print_exc()
        return Answer(error=f"the planner broke: {type(error).__name__}: {error}")


def main() -> None:
    """Answer requests until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    while True:
        answers.write(answer_to(lines.get()).model_dump_json(by_alias=True) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
