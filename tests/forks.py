"""Processes that tests start, forked from one that has loaded their modules already: a start costs no import.

A test module says as it is imported what its processes load (`preload`); the first start loads all of it.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Have `modules` loaded before the first process is forked."""
    _preloaded.extend(modules)
    FORKS.set_forkserver_preload(_preloaded)


def run_ranks(num_ranks: int, run: Callable[[int], int]) -> int:
    """Run each rank in a fork of this process, which has loaded all; return how many ended with another status than 0.

    This process must have no threads.
    """
    processes = []
    for rank in range(num_ranks):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                gc.freeze()
                status = run(rank)
            except BaseException:  # a traceback for the test; the fork must not go on as its parent
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        processes.append(child)
    return sum(os.waitpid(one, 0)[1] != 0 for one in processes)


def output_of(command: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Run a program with all that it forks; return its status and output. Past the limit all of it is killed."""
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=limit_s)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said


class ForkedProgram:
    """`python -W error -m MODULE FOLDER`, forked, in a session of its own; its output goes to `log`.

    `pid`, `poll`, `kill` and `wait` are those of `subprocess.Popen`.
    """

    def __init__(self, module: str, folder: Path, log: Path) -> None:
        self._process = FORKS.Process(target=_become, args=(module, str(folder), str(log)))
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """Return the exit status, less than 0 the signal that ended it, None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process; one that has ended stays as it is."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status; `subprocess.TimeoutExpired` where it does not end in time."""
        self._process.join(timeout_s)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0.0)
        return status


def _become(module: str, folder: str, log: str) -> None:
    gc.freeze()  # what the tests have loaded is not gone through again and again
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    warnings.simplefilter("error")
    status = importlib.import_module(module).main([folder])
    sys.stdout.flush()
    os._exit(status)
