"""Gradients that are summed during the last backward pass: the same bits, begun before the pass has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.plan import Plan
from isthmus.plan.search.finish.runtime_support import runtime_incompatibility
from isthmus.train.update.accumulation_counts import AccumulationCounts
from tests.train.replica_threads import Cut, Replicas, make_plan
from tests.train.small_models import write_config
from tests.train.test_replicas import EVEN, LENGTH, UNLIKE, make_training

pytestmark = pytest.mark.usefixtures("one_thread")

TWO_STAGES = Cut(ends=[2, 4], clusters="ab", micro_batches=4, size=1)
SINGLE = (Cut(ends=[4], clusters="a", micro_batches=2, size=2), Cut(ends=[4], clusters="b", micro_batches=2, size=2))


def train(model: Path, plan: Plan, precision: str, steps: int = 3) -> tuple[list[Any], list[dict[str, Any]], list[Any]]:
    """Return the result of each step, the weights of each rank, and by rank and step the batches begun early."""
    replicas = Replicas(model, plan, make_training(steps=steps, precision=precision), bucket_elements=128)
    try:
        found = replicas.train(steps)
        weights = [replicas.weights(rank) for rank in range(len(replicas.ranks))]
        return found, weights, [one.started_early for one in replicas.ranks]
    finally:
        replicas.close()


CASES = [
    ("llama", SINGLE, {}, "fp32"),
    ("llama-tied", UNLIKE, {"zero": 1}, "bf16"),
    ("qwen3-moe-tied-sparse", EVEN, {"zero": 1}, "fp32"),
    ("llama-tied", [TWO_STAGES] * 2, {"schedule": "zero_bubble"}, "fp32"),
    ("llama", [TWO_STAGES] * 2, {"schedule": "interleaved", "chunks": 2}, "bf16"),
    ("llama", [TWO_STAGES], {"schedule": "dualpipe"}, "fp32"),
    ("mixtral", [TWO_STAGES] * 2, {"optimizer_on_host": True}, "fp32"),
]


@pytest.mark.integration
@pytest.mark.parametrize(("variant", "cuts", "changes", "precision"), CASES)
def test_sums_during_the_backward_pass_have_the_same_bits(
    variant: str, cuts: Sequence[Cut], changes: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    """Losses, norms and weights are equal bit for bit; from the second step on sums begin before the update."""
    model = write_config(tmp_path, variant)
    plans = [make_plan(cuts, LENGTH, **changes, overlap_gradients=one) for one in (False, True)]
    assert [runtime_incompatibility(one) for one in plans] == [None, None]
    (expected, weights, before), (found, overlapped, early) = (train(model, one, precision) for one in plans)
    assert found == expected
    for ours, theirs in zip(overlapped, weights, strict=True):
        assert all(torch.equal(ours[name], one) for name, one in theirs.items())
    assert not any(map(any, before))
    assert all(steps[0] == 0 for steps in early), "the first step shows how often gradients are added to"
    assert all(min(steps[1:]) > 0 for steps in early), early


@given(counts=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_a_gradient_is_final_once_it_is_added_to_as_often_as_in_the_last_step(counts: list[tuple[str, bool]]) -> None:
    """In any order of additions; a step that failed teaches nothing, and one addition more is an error."""
    names = [name for name, _ in counts]
    known = AccumulationCounts()
    assert not any(known.add(name) for name in names)
    known.discard_step()
    assert not any(known.add(name) for name in names)
    assert not any(map(known.is_final, "abc"))
    known.end_step()
    left = {name: names.count(name) for name in names}
    for name in reversed(names):
        left[name] -= 1
        assert known.add(name) == (left[name] == 0) == known.is_final(name)
    for name in left:
        with pytest.raises(RuntimeError, match=f"the gradient of {name}"):
            known.add(name)
