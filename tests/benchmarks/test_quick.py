"""Rules of short runs: every benchmark's `--quick` ends within a limit and prints rows or the reason for none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.__main__ as command
from benchmarks.table import Row

ROOT = Path(__file__).parents[2]
LIMIT_S = 480.0
SAMPLED = ("published", "site_queue")
"""The short runs that a run without `--whole` tries."""

OPTIONS = {"demo": ("--minutes", "1")}
"""Beside `--quick`: the demo otherwise waits longer for a calm machine."""

NOTHING_TO_DO = ("no checkout of Sailor", "no CUDA device", "needs root and Slurm", "no emulated packets")
"""Why a benchmark may print no row."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try the sample, or with `--whole` every benchmark."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", command.names() if metafunc.config.getoption("--whole") else SAMPLED)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_a_short_run_ends_and_prints_rows(name: str) -> None:
    """It exits with 0, or with 1 and a row whose target is missed: a busy machine is not a fault of the benchmark."""
    status, printed, told = run_within_limit(name)
    rows = [Row(**json.loads(line)) for line in printed.splitlines() if line.startswith("{")]
    assert rows or any(reason in told for reason in NOTHING_TO_DO), told
    assert status == 0 or (status == 1 and any(row.met is False for row in rows)), told


def run_within_limit(name: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a short run; past the limit it ends, with all that it started."""
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", *OPTIONS.get(name, ())]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            printed, told = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, told = process.communicate()
            pytest.fail(f"benchmarks.{name} --quick ran for more than {LIMIT_S:g} s; it printed\n{told}")
    return process.returncode, printed, told
