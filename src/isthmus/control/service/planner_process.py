"""`PlannerProcess`: the planner in a subprocess, so that a long search blocks no request and can be killed.

`PlannerPool` has several of them, so that one user's search does not hold up another user's.

`python -m isthmus.control.service.planner_process` reads one JSON request per line on standard input and
writes one JSON reply per line on standard output: `{"plans": ...}`, or `{"error": ...}` if the job cannot be
planned. It exits at end of input, even during a search, so it never outlives its server. Its standard error
is the server's.
"""

from __future__ import annotations

import os
import queue
import resource
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from isthmus.control.placement import PlanRequest
from isthmus.core.base_model import FrozenModel
from isthmus.core.errors import IsthmusError, PlanError
from isthmus.core.plan import PlanSet
from isthmus.core.process.gc_pause import collection_paused

SEARCH_TIMEOUT_S = 120.0
"""Time limit of one search; other jobs wait meanwhile."""

SEARCH_CPU_S = 20.0
"""CPU time of one search, after which the best plans so far are the answer."""

NUM_PLANNERS = 2
"""Searches at a time. One user has at most one fewer, so that another user's request finds a process."""

MEMORY_LIMIT_BYTES = 4 * 2**30
"""Address space limit of the planner process."""

COMMAND = (sys.executable, "-m", "isthmus.control.service.planner_process")
_NICE = 5


class PlannerReply(FrozenModel):
    """The planner's reply: the plans, or the error that prevented them."""

    plans: PlanSet | None = None
    error: str = ""


class PlanningEndedError(IsthmusError):
    """The server is shutting down; the next server repeats the request."""


class PlannerProcess:
    """Runs `propose_plans` in a subprocess that the first call starts; one search at a time.

    Raises `PlanError` if the job cannot be planned, the search exceeds `timeout_s` or the process dies; the
    next call then starts a new process.
    """

    def __init__(self, *, timeout_s: float = SEARCH_TIMEOUT_S, command: Sequence[str] = COMMAND) -> None:
        self._timeout_s, self._command = timeout_s, tuple(command)
        self._search_lock, self._child_lock = threading.Lock(), threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._closed = False

    def __call__(self, request: PlanRequest) -> PlanSet:
        """Return candidate plans; see `isthmus.control.placement.propose_plans`."""
        with self._search_lock:
            line, late = self._exchange_lines(request.model_dump_json(by_alias=True))
            if not line:
                self._kill_child()
        if self._closed:
            raise PlanningEndedError("the server is shutting down")
        if not line:
            what = f"took longer than {self._timeout_s:g} s" if late else "failed: its process died"
            raise PlanError(f"the search for plans {what}", hint="narrow the job's placement, or submit it again")
        answer = PlannerReply.model_validate_json(line)
        if answer.plans is None:
            raise PlanError(answer.error)
        return answer.plans

    @property
    def has_process(self) -> bool:
        """Whether the planner's process has been started and not killed."""
        return self._child is not None

    def close(self) -> None:
        """Kill the process, even during a search; further calls raise `PlanningEndedError`."""
        self._closed = True
        self._kill_child()

    def _kill_child(self) -> None:
        with self._child_lock:
            child, self._child = self._child, None
        if child is not None:
            _kill_process(child)

    def _exchange_lines(self, line: str) -> tuple[str, bool]:
        """Return the process's reply, "" if there was none, and whether the search timed out."""
        child = self._running_child()
        if child is None or child.stdin is None or child.stdout is None:
            return "", False
        late = threading.Event()

        def give_up() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(self._timeout_s, give_up)
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

    def _running_child(self) -> subprocess.Popen[str] | None:
        with self._child_lock:
            if self._closed:
                return None
            if self._child is not None and self._child.poll() is None:
                return self._child
            if self._child is not None:
                _kill_process(self._child)
            self._child = subprocess.Popen(  # noqa: S603 - the command is fixed where the server starts
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches the server only, which then kills its planner
            )
            return self._child


class PlannerPool:
    """Runs each search in a process of its own that the first such search starts; raises like `PlannerProcess`."""

    def __init__(self, count: int = NUM_PLANNERS, make_process: Callable[[], PlannerProcess] = PlannerProcess) -> None:
        self.processes = tuple(make_process() for _ in range(count))
        self._idle: queue.LifoQueue[PlannerProcess] = queue.LifoQueue()
        for process in reversed(self.processes):
            self._idle.put(process)

    def __call__(self, request: PlanRequest) -> PlanSet:
        """Return candidate plans from an idle process; the caller starts at most as many searches as there are."""
        process = self._idle.get_nowait()
        try:
            return process(request)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Kill the processes, even during a search; further calls raise `PlanningEndedError`."""
        for process in self.processes:
            process.close()


def _kill_process(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue


def answer_request(line: str, cpu_s: float = SEARCH_CPU_S) -> PlannerReply:
    """Return the reply of `propose_plans` to a request; an unexpected exception is logged and summarised.

    The search ends after `cpu_s` of this process with the best plans so far.
    """
    from isthmus.control.placement.propose_plans import propose_plans  # only this process loads the planner

    end_s = time.process_time() + cpu_s
    try:
        with collection_paused():
            request = PlanRequest.model_validate_json(line)
            return PlannerReply(plans=propose_plans(request, should_continue=lambda: time.process_time() < end_s))
    except IsthmusError as error:
        return PlannerReply(error=str(error))
    except Exception as error:
        traceback.print_exc()
        return PlannerReply(error=f"the planner failed: {type(error).__name__}: {error}")


def main() -> None:
    """Answer requests until standard input ends; the argument is the CPU time of one search in seconds."""
    cpu_s = float(sys.argv[1]) if len(sys.argv) > 1 else SEARCH_CPU_S
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
        answers.write(answer_request(lines.get(), cpu_s).model_dump_json(by_alias=True) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
