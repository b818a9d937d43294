"""Property tests try the same examples in every run, so that a red run means a change and not a draw.

They try 50 each where they name no number, 100 with `--whole` and against mutants.

Nothing but what carries `on_the_clock` is judged by its time: the machine may be busy. What does is tried up
to three times, and a second try is reported. New examples are looked for with
`python -m pytest --hypothesis-profile=explore`.

Of rules that take long, and hold of many cases alike, a run tries a sample; `--whole` tries all.
`--slowest-files N` lists where the CPU time of a run went.

Arithmetic runs in one thread per process, as in a worker. Threads that wait for each other in a loop took 55 times
the CPU on two busy cores.
"""

import gc
import os
import re
import resource
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("TEST_PROFILE", "repeatable"))

TRIES = 3

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before the first import of torch or numpy; started processes inherit it


def pytest_configure(config: pytest.Config) -> None:
    """Restore SIGINT where it is ignored, as in a background job of a script: children of the tests inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--whole") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("thorough")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run try all cases."""
    parser.addoption("--whole", action="store_true", help="try all cases where otherwise a sample is tried")
    parser.addoption("--fuzz-s", type=float, default=0.0, metavar="S", help="fuzz each parser for S seconds of CPU")
    parser.addoption("--pictures", action="store_true", help="write the pictures of the console in docs again")
    parser.addoption("--slowest-files", type=int, default=0, metavar="N", help="list the N files of most CPU time")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the modules and tests, which live as long as the run, out of each garbage collection (seconds of CPU)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file unread whose tests all have a marker that `-m "not a and not b"` excludes: imports take seconds."""
    markers = config.getoption("markexpr").split(" and ")
    if collection_path.suffix != ".py" or not all(re.fullmatch(r"not \w+", one) for one in markers):
        return None
    stated = re.search(
        r"^pytestmark = (.+?)\n(?=\S|\n)", collection_path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    names = re.findall(r"pytest\.mark\.(\w+)", stated[1]) if stated else []
    return any(f"not {name}" in markers for name in names) or None


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Return whether all cases are tried."""
    return bool(request.config.getoption("--whole"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a test that reads the clock be tried again; count CPU time from here, behind all imports."""
    config.stash[_counted_cpu_s] = cpu_s()
    for item in items:
        if item.get_closest_marker("on_the_clock"):
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1, reruns_delay=2))


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_counted_cpu_s = pytest.StashKey[float]()
"""The CPU time that is some test's already, or was used before the first one."""


def cpu_s() -> float:
    """Return the CPU seconds of this process, of its children that have ended, and of those that run.

    What a child of a child uses counts once its parent has waited for it.
    """
    used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total_s = sum(one.ru_utime + one.ru_stime for one in used)
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in listed.read_text().split():
                with suppress(OSError):
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    total_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
    return total_s


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the CPU time of each phase of a test with its report, which a process of pytest-xdist sends on."""
    report = yield
    now_s = cpu_s()
    report.user_properties.append(("cpu_s", now_s - item.config.stash[_counted_cpu_s]))
    item.config.stash[_counted_cpu_s] = now_s
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the files of most CPU time, with their CPU seconds, the seconds they took, and their tests."""
    if not (num_listed := config.getoption("--slowest-files")):
        return
    cpu, took, tests = Counter[str](), Counter[str](), Counter[str]()
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            cpu[file] += dict(report.user_properties).get("cpu_s", 0.0)
            took[file] += report.duration
            tests[file] += report.when == "call"
    terminalreporter.section(f"slowest files, of {cpu.total():.0f} CPU s in all")
    for file, file_cpu_s in cpu.most_common(num_listed):
        terminalreporter.write_line(f"{file_cpu_s:7.1f} CPU s {took[file]:7.1f} s {tests[file]:4} tests  {file}")
