"""Fixtures of the control plane's tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.control import postgres as real
from tests.control.test_server_api import Server

_numbers = itertools.count()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Load schemathesis' plugin, whose imports take a second, for the one module that it collects."""
    if file_path.name == "test_fuzz.py":
        parent.config.pluginmanager.import_plugin("schemathesis.pytest.plugin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fuzz a third of the operations, a second of CPU time each, or all with `--whole`."""
    fuzzed = [item for item in items if item.path.name == "test_fuzz.py"]
    for number, item in enumerate(fuzzed):
        if number % 3 and not config.getoption("--whole"):
            item.add_marker(pytest.mark.skip(reason="one of the operations that --whole tries"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A PostgreSQL server's connection string, without a database."""
    found = real.binaries()
    if found is None:
        pytest.skip(f"PostgreSQL is not installed: {real.INSTALL}")
    with real.running(found) as address:
        yield address


@pytest.fixture
def postgres(postgres_server: str) -> str:
    """A connection string of an empty database."""
    name = f"t{next(_numbers)}"
    with psycopg.connect(f"{postgres_server} dbname=postgres", autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
    return f"{postgres_server} dbname={name}"


@pytest.fixture
def server() -> Iterator[Server]:
    """The application over a store in memory, in this process."""
    with _running_server() as made:
        yield made


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    """The same for the tests of a module whose requests change nothing."""
    with _running_server() as made:
        yield made


@contextmanager
def _running_server() -> Iterator[Server]:
    made = Server()
    made.shell.start()
    with made.http:
        yield made
    made.shell.close()
