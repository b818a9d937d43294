"""torch takes the group as its own: its collectives and parallelisms give over it what they give over gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forks import output_of

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


@pytest.mark.slow
def test_torch_runs_over_the_group_as_over_gloo(tmp_path: Path) -> None:
    """Four processes in two clusters: `dist.*`, all subsets of ranks, DDP, FSDP2, HSDP and DTensor."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.comm.torch_programs", str(tmp_path)]
    status, said = output_of(command, ROOT, LIMIT_S)
    assert status == 0, said
