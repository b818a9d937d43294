"""Runs by seeds that are kept: a later call goes on with them, several share a folder, and no cut run is hidden."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks._sites_amount import Amount
from benchmarks._sites_faults import fault_rows
from benchmarks._sites_record import SeededRuns


def made(seed: int, problems: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(num_faults=10, problems=Counter(problems or {}), longest_hold_s=float(seed), steps=[])


def test_seeds_are_taken_once_and_results_are_kept(tmp_path: Path) -> None:
    """Also by another process of the same folder; a run that did not end is counted as open."""
    one, other = SeededRuns(tmp_path), SeededRuns(tmp_path)
    assert [one.take(), other.take(), one.take()] == [0, 1, 2]
    one.note(2, {"faults": 2})
    other.note(1, {"faults": 1})
    assert ([run["faults"] for run in one.results], one.num_open) == ([1, 2], 1)


def test_a_later_call_goes_on_and_its_rows_count_all(tmp_path: Path) -> None:
    """Problems of earlier runs stay in the rows, and so does what was cut off."""
    seeds: list[int] = []

    def run(seed: int) -> Any:
        seeds.append(seed)
        return made(seed, {"lost": 1} if seed == 1 else None)

    fault_rows("Slurm", 20, Amount(record=tmp_path), run)
    SeededRuns(tmp_path / "faults-slurm").take()
    lost, longest = fault_rows("Slurm", 40, Amount(record=tmp_path), run)
    assert seeds == [0, 1, 3, 4]
    assert (lost.ours, lost.met, longest.ours) == (1, False, 4.0)
    assert lost.what.startswith("40 seeded faults on a real Slurm, 4 runs, 1 cut off")


def test_without_a_record_nothing_is_kept() -> None:
    """Each call begins anew."""
    for _ in range(2):
        seeds: list[int] = []
        fault_rows("Ray", 15, Amount(), lambda seed, seeds=seeds: seeds.append(seed) or made(seed))
        assert seeds == [0, 1]
