"""Rules of the benchmark of a device's copies: what it works out, and what it says where there is none."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Taken, overlaps
from tests.train.late_copies import LateCopies


def test_overlap_is_the_part_of_the_shorter_that_takes_no_time() -> None:
    """3 s and 1 s take 3 s together, 3.5 s, or one after the other 4 s."""
    both = Taken(wall_s=[3.0, 3.5, 4.0])
    assert overlaps(Taken(wall_s=[3.0] * 3), Taken(wall_s=[1.0] * 3), both) == [1.0, 0.5, 0.0]


def test_every_way_is_measured() -> None:
    """With a processor in the place of the device: each row is there, and copies went through the staging."""
    copies = LateCopies()
    found = list(gpu.run(torch.device("cpu"), copies, [64], 4, rounds=2, micro_batches=3))
    assert len(found) == len(gpu.RATIOS) * 8
    assert all(one.ours > 0 for one in found if one.unit == "ms")
    steps = len(gpu.RATIOS) * (3 + 2 * 3)
    assert sum(what == "copy" for what, _ in copies.told) == steps * 2 * 3


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed that could be taken for a figure."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--json"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main()
    told = capsys.readouterr()
    assert told.out == ""
    assert "skipped: torch sees no CUDA device" in told.err
