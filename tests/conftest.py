"""Property tests try the same examples in every run, so that a red run means a change and not a draw.

Nothing but what carries `on_the_clock` is judged by its time: the machine may be busy. What does is tried up
to three times, and a second try is reported. New examples are looked for with
`python -m pytest --hypothesis-profile=explore`.

Of rules that take long, and hold of many cases alike, a run tries a sample; `--whole` tries all.

Arithmetic runs in one thread per process, as in a worker. Threads that wait for each other in a loop took 55 times
the CPU on two busy cores.
"""

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("repeatable")

TRIES = 3

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before the first import of torch or numpy; started processes inherit it


def pytest_configure() -> None:
    """Restore SIGINT where it is ignored, as in a background job of a script: children of the tests inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run try all cases."""
    parser.addoption("--whole", action="store_true", help="try all cases where otherwise a sample is tried")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a test that reads the clock be tried again."""
    for item in items:
        if item.get_closest_marker("on_the_clock"):
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1, reruns_delay=2))
