"""A month of three owners through the real server and agents: each statement is what the owner counted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.owners_month import SHORT, MonthLoad, OwnersMonth

pytestmark = pytest.mark.integration


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: every change of server and agents is flushed to disk."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    yield made
    shutil.rmtree(made)


def test_each_owners_statement_is_what_it_counted_to_the_cent(folder: Path) -> None:
    """Also when agents are killed, sites cut off, the server killed, parts evicted, and prices change."""
    month = OwnersMonth(folder=folder, load=SHORT, seed=1)
    month.run()
    assert month.differences == []
    assert all(ours == own > 0 for ours, own in month.cents.values())
    assert month.waits is not None
    assert month.waits.final
    assert (month.waits.jobs, month.waits.open) == (month.counts["jobs"], 0)
    assert month.waits.compared
    assert all(month.counts[kind] for kind in ("agents killed", "sites cut off", "server killed", "prices"))


@pytest.mark.slow
def test_a_whole_month_of_load(whole: bool, folder: Path) -> None:
    """A thousand jobs, with faults every other day."""
    if not whole:
        pytest.skip("minutes: --whole tries it")
    month = OwnersMonth(folder=folder, load=MonthLoad(), seed=0)
    month.run()
    assert month.differences == []
    assert month.counts["parts evicted"] > 0
