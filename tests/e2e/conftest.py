"""Pools that several tests use one after another: each test releases what it has used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isthmus.cli.demo.demo_pool import DemoPool
from tests.e2e.site import clusters_of, running


@pytest.fixture(scope="package")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPool]:
    """Three owners with one core of 800 kB each: the model needs all three."""
    clusters = clusters_of({"north": 1, "south": 1, "west": 1}, 2e-4)
    with running(tmp_path_factory.mktemp("three"), clusters) as pool:
        yield pool


@pytest.fixture(scope="package")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPool]:
    """Two owners with two cores each, with all their memory."""
    with running(tmp_path_factory.mktemp("pairs"), clusters_of({"north": 2, "south": 2}, 1.0)) as pool:
        yield pool
