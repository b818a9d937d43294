"""torch takes the group as its own: its collectives and parallelisms give over it what they give over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.torch_programs import SIZE

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


@pytest.mark.slow
def test_torch_runs_over_the_group_as_over_gloo(tmp_path: Path) -> None:
    """Four processes in two clusters: `dist.*`, all subsets of ranks, DDP, FSDP2, HSDP and DTensor."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.comm.torch_programs", str(rank), str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        said = [one.communicate(timeout=LIMIT_S)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert [one.returncode for one in ranks] == [0] * SIZE, "\n".join(said)
