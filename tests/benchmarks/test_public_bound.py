"""Runs that a plan cannot tell apart: which they are, how far they differ, what error that leaves."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks._models import even_plan
from benchmarks._public_bound import alike, bound_rows, factor_rows, least_error, scatter
from benchmarks._public_run import PublicRun, public_cluster, public_model
from isthmus.core.plan_parts.tensor_formats import TensorFormats


def run(measured_s: float | None, stack: str = "megatron", **fields: object) -> PublicRun:
    """A run of Llama 3.1 8B on eight chips."""
    profile = public_model("llama-3.1-8b")
    sizes = {"micro_batches": 4, "micro_batch_size": 1, "sequence_length": 8192} | fields
    plan = even_plan(profile.num_layers, tp=1, pp=1, dp=8, stack=stack, **sizes)
    return PublicRun(
        name="r", kind="dense", plan=plan, pool=public_cluster("H100", 8, 400.0), profile=profile, measured_s=measured_s
    )


def test_runs_are_alike_whatever_the_version_of_their_stack() -> None:
    """Another stack or format of gathers is alike; another batch, another chip, or a run out of memory is not."""
    first = run(1.0)
    other = dataclasses.replace(run(2.0), pool=public_cluster("A100", 8, 400.0))
    runs = [first, run(1.2, "torchtitan"), run(3.0, micro_batch_size=2), run(None), other]
    assert alike(runs) == [[1.0, 1.2]]
    assert bound_rows("set", [first, other]) == []


def test_runs_with_a_scale_for_each_row_are_apart_from_those_with_one_for_a_tensor() -> None:
    """A plan tells them apart by `formats.scales`; how weights are gathered does not part runs."""
    formats = (TensorFormats(gathers="fp8"), TensorFormats(), TensorFormats(scales="row"))
    runs = [run(1.0 + i, "torchtitan", precision="fp8", formats=one) for i, one in enumerate(formats)]
    assert alike(runs) == [[1.0, 2.0]]


def test_the_scatter_is_that_within_groups() -> None:
    """Two groups that differ by a factor of ten within which runs are 10 % apart scatter by 10 % over root two."""
    groups = [[1.0, math.exp(0.1)], [10.0, 10 * math.exp(0.1)]]
    assert scatter(groups) == pytest.approx(0.1 / math.sqrt(2))
    assert scatter([]) == 0.0


def test_one_prediction_cannot_be_right_for_two_runs() -> None:
    """Of 1 s and 2 s the best guess is 1 s, which is half of the other; all runs count in the mean."""
    assert least_error([[1.0, 2.0]]) == pytest.approx(0.5)
    rows = bound_rows("set", [run(1.0), run(2.0, "isthmus"), run(3.0, micro_batch_size=2)])
    assert rows[1].ours == pytest.approx(100 * 0.5 / 3)


def test_factors_in_hindsight_leave_what_runs_of_a_kind_differ_by() -> None:
    """Two stacks, 1.2 and 0.9 times their predictions, one of each run 10 % more: a factor each leaves 10 % of half."""
    times = [("megatron", 1.2), ("megatron", 1.32), ("torchtitan", 0.9), ("torchtitan", 0.99)]
    runs = [dataclasses.replace(run(time, stack), name=f"{index}") for index, (stack, time) in enumerate(times)]
    rows = factor_rows("set", runs, {one.name: 1.0 for one in runs})
    one_for_all, each_stack, each_kind = (row.ours for row in rows)
    assert each_stack == each_kind == pytest.approx(100 * (2 * (1 - 1 / 1.1)) / 4)
    assert one_for_all > each_stack
    assert [row.what.split(", ")[1].split(" ")[0] for row in rows] == ["1", "2", "2"]
