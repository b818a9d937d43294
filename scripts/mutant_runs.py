"""Runs tests against mutants: a pytest plugin that forks per mutant once all tests are collected."""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Literal, NoReturn

import pytest

from scripts.mutant_list import Mutant, module_name

Status = Literal["killed", "timeout", "survived", "no test", "not run"]
"""`timeout` counts as killed: an endless loop, a lost message. `not run`: the mutant does not fit its function."""

SURVIVED, KILLED, NOT_RUN = 0, 1, 4
MEMORY_BYTES = 4 << 30
"""What a mutant may allocate beyond the memory of the test process."""


@dataclass
class Reach:
    """What one run without a mutant shows: how long each test takes, and which functions it calls."""

    durations_s: dict[str, float] = field(default_factory=dict)
    tests_by_function: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    failures: list[str] = field(default_factory=list)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the function of `mutant`, the fastest first."""
        tests = self.tests_by_function.get((str(mutant.path), mutant.qualified_name), set())
        return sorted(tests, key=lambda test: (self.durations_s[test], test))


class MutantRuns:
    """Replaces the run of the collected tests by one forked run per mutant."""

    def __init__(
        self, mutants: Sequence[Mutant], source_root: Path, children: int, on_result: Callable[[Mutant, Status], None]
    ) -> None:
        self._mutants = mutants
        self._source_root = source_root
        self._children = children
        self._on_result = on_result

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests that reach each mutant until the first one fails."""
        items = {item.nodeid: item for item in session.items}
        reach = self._in_child_with_result(items)
        if reach.failures:
            raise pytest.UsageError(f"these tests fail without a mutant: {', '.join(reach.failures)}")
        running: dict[int, Mutant] = {}
        for mutant in self._mutants:
            tests = reach.tests_of(mutant)
            if not tests:
                self._on_result(mutant, "no test")
                continue
            if len(running) >= self._children:
                self._wait(running)
            expected_s = sum(reach.durations_s[test] for test in tests)
            pid = os.fork()
            if pid == 0:
                _test_mutant(mutant, self._source_root, [items[test] for test in tests], expected_s)
            running[pid] = mutant
        while running:
            self._wait(running)
        return True

    def _wait(self, running: dict[int, Mutant]) -> None:
        pid, state = os.wait()
        status = os.waitstatus_to_exitcode(state)
        named: dict[int, Status] = {SURVIVED: "survived", KILLED: "killed", NOT_RUN: "not run"}
        self._on_result(running.pop(pid), "timeout" if status < 0 else named[status])

    def _in_child_with_result(self, items: Mapping[str, pytest.Item]) -> Reach:
        """Observe the run in a child: caches that it fills must not hide a mutant."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with os.fdopen(writer, "wb") as stream:
                _observe(list(items.values()), str(self._source_root), stream)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            reach: Reach = pickle.load(stream)  # noqa: S301 - from our own child
        os.waitpid(pid, 0)
        return reach


class _Failures:
    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._on_failure(report.nodeid)


def _observe(items: Sequence[pytest.Item], source_root: str, stream: IO[bytes]) -> None:
    reach = Reach()
    seen: set[tuple[str, str]] = set()

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(source_root):
            seen.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))

    _silence()
    items[0].config.pluginmanager.register(_Failures(reach.failures.append))
    threading.settrace(trace)
    for item, following in zip(items, [*items[1:], None], strict=True):
        sys.settrace(trace)  # again for each test: one that exhausts the stack takes the trace function away
        start_s = time.process_time()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        reach.durations_s[item.nodeid] = time.process_time() - start_s
        for function in seen:
            reach.tests_by_function[function].add(item.nodeid)
        seen.clear()
    sys.settrace(None)
    reach.tests_by_function = dict(reach.tests_by_function)  # without its default, which no stream can carry
    pickle.dump(reach, stream)


def _test_mutant(mutant: Mutant, source_root: Path, items: Sequence[pytest.Item], expected_s: float) -> NoReturn:
    _silence()
    _limit(expected_s)
    try:
        mutant.apply(importlib.import_module(module_name(mutant.path, source_root)))
    except ValueError:
        os._exit(NOT_RUN)
    items[0].config.pluginmanager.register(_Failures(lambda _test: os._exit(KILLED)))
    try:
        _run(items)
    except BaseException:
        os._exit(KILLED)
    os._exit(SURVIVED)


def _run(items: Iterable[pytest.Item]) -> None:
    items = list(items)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _limit(expected_s: float) -> None:
    """End this process by a signal once it runs much longer than the tests do, and bound its memory."""
    for kind, number, limit_s in (
        (signal.ITIMER_PROF, signal.SIGPROF, 3 * expected_s + 2),
        (signal.ITIMER_REAL, signal.SIGALRM, 30 * expected_s + 60),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(kind, limit_s)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
