"""Rules of replicas: however a batch and the model are divided among them, they train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.job import TrainingConfig
from isthmus.train.update.replica_layout import PipelinePosition, replica_samples
from tests.train.devices import on_devices
from tests.train.replica_threads import Cut, Replicas, curve, make_plan
from tests.train.small_models import NUM_LAYERS, write_config
from tests.train.threads import LONG

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

LENGTH = 8
ONE = Cut(ends=[4], clusters="a", micro_batches=4, size=2)
UNLIKE = (
    Cut(ends=[1, 4], clusters="ab", micro_batches=3, size=1),
    Cut(ends=[2, 3, 4], clusters="abb", micro_batches=1, size=3),
    Cut(ends=[4], clusters="b", micro_batches=1, size=2),
)
EVEN = (Cut(ends=[2, 4], clusters="ab", micro_batches=2, size=2),) * 2


def make_training(**changes: object) -> TrainingConfig:
    """Return hyper-parameters for a model of a few thousand parameters."""
    fields = {
        "steps": 6, "sequence_length": LENGTH, "micro_batch_size": 2, "global_batch_size": 8,
        "learning_rate": 3e-3, "warmup_steps": 3, "precision": "fp32", "clip_norm": 0.5,
    }  # fmt: skip
    return TrainingConfig.model_validate(fields | changes)


def close(found: list, expected: list, rel: float) -> None:
    """Assert that two curves agree in loss and gradient norm."""
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=rel)
    assert [one.gradient_norm for one in found] == pytest.approx([one.gradient_norm for one in expected], rel=100 * rel)


@on_devices
@pytest.mark.parametrize("variant", ["llama-tied", "mixtral"])
def test_unlike_replicas_train_what_one_process_trains(variant: str, device: str, tmp_path: Path) -> None:
    """Three replicas of one to three stages, unlike cuts, micro-batches and clusters: the same curve.

    A sample of the long comparison below.
    """
    model, training = write_config(tmp_path, variant), make_training()
    alone = curve(model, make_plan([ONE], LENGTH), training, device=device)
    close(curve(model, make_plan(UNLIKE, LENGTH), training, device=device), alone, 1e-5)
    assert alone[-1].loss < alone[0].loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "cuts", "zero", "sampled"),
    [
        ("qwen3-tied-window", EVEN, 0, False),
        ("qwen3-tied-window", UNLIKE, 1, False),
        ("qwen3-moe-tied-sparse", EVEN, 0, False),
        ("qwen3-moe-tied-sparse", UNLIKE, 1, True),
    ],
    ids=["dense, even", "dense, unlike", "experts, even", "experts, unlike"],
)
def test_the_curves_of_200_steps_agree(
    variant: str,
    cuts: Sequence[Cut],
    zero: int,
    sampled: bool,
    steps_of: Callable[[bool], int],
    tmp_path: Path,
) -> None:
    """Even replicas, and unlike ones with ZeRO-1, agree with one process to 1e-4 at each of 200 steps.

    60 steps of a sample of them in a run of the tests, of the others a few.
    """
    model, training, steps = write_config(tmp_path, variant), make_training(steps=LONG), steps_of(sampled)
    alone = curve(model, make_plan([ONE], LENGTH), training, steps)
    close(curve(model, make_plan(cuts, LENGTH, zero=zero), training, steps), alone, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "sampled"), [("llama-tied", True), ("mixtral", False)])
def test_where_the_sums_have_one_order_curves_agree_to_1e_6(
    variant: str, sampled: bool, steps_of: Callable[[bool], int], tmp_path: Path
) -> None:
    """Replicas cut unlike one another have the curve of replicas in one piece each, to 1e-6.

    The samples of each replica are the same, and so is the order in which gradients are added. 200 steps, or
    in a run of the tests 60 of a sample of the cases.
    """
    model, training, steps = write_config(tmp_path, variant), make_training(steps=LONG), steps_of(sampled)
    whole = [Cut(ends=[4], clusters="a", micro_batches=count, size=2) for count in (3, 1)]
    expected = curve(model, make_plan(whole, LENGTH), training, steps)
    unlike = [
        Cut(ends=[1, 4], clusters="ab", micro_batches=3, size=2),
        Cut(ends=[2, 3, 4], clusters="cba", micro_batches=1, size=2),
    ]
    close(curve(model, make_plan(unlike, LENGTH), training, steps), expected, 1e-6)


def test_all_owners_compute_with_the_same_bits(tmp_path: Path) -> None:
    """After some steps every replica holds the same weights, bit by bit, wherever its cuts are."""
    model, training = write_config(tmp_path, "llama-tied"), make_training(steps=3)
    replicas = Replicas(model, make_plan(UNLIKE, LENGTH), training)
    replicas.train(3)
    whole = replicas.weights(5)
    for rank in range(5):
        for name, tensor in replicas.weights(rank).items():
            assert torch.equal(tensor, whole[name]), (rank, name)
    replicas.close()


@pytest.mark.parametrize(("variant", "precision"), [("llama-tied", "fp32"), ("mixtral", "bf16")])
def test_shared_updates_have_the_bits_of_whole_ones(variant: str, precision: str, tmp_path: Path) -> None:
    """ZeRO-1: with moments dealt out in each cluster, loss, norm and weights are the same bits.

    Each rank of a cluster keeps about its part of the moments, all of them together one copy.
    """
    model, training = write_config(tmp_path, variant), make_training(precision=precision, steps=4)
    plans = [make_plan(UNLIKE, LENGTH, zero=zero) for zero in (0, 1)]
    whole, shared = (Replicas(model, plan, training) for plan in plans)
    assert shared.train(4) == whole.train(4)
    for rank in range(6):
        for name, tensor in whole.weights(rank).items():
            assert torch.equal(tensor, shared.weights(rank)[name]), (rank, name)
    for cluster in "ab":
        ranks = [rank for rank, other in enumerate(plans[0].rank_clusters) if other == cluster]
        names = {name for rank in ranks for name in shared.weights(rank)}
        assert sum(moments(shared, rank) for rank in ranks) == sum(
            max(shared.weights(rank)[name].numel() for rank in ranks if name in shared.weights(rank)) for name in names
        )
    assert moments(shared, 5) < 0.6 * moments(whole, 5)
    whole.close()
    shared.close()


def moments(replicas: Replicas, rank: int) -> int:
    """Return how many first moments a rank keeps."""
    state = replicas.ranks[rank].optimizer.checkpoint_state()
    return sum(one.numel() for name, one in state.items() if name.startswith("exp_avg/"))


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_replicas_train_alike(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random replicas, stages, cuts, clusters, micro-batches and sizes: one step is that of one process."""
    cuts = []
    for _ in range(data.draw(st.integers(1, 3))):
        ends = [*sorted(data.draw(st.sets(st.integers(1, NUM_LAYERS - 1), max_size=2))), NUM_LAYERS]
        clusters = data.draw(st.text("abc", min_size=len(ends), max_size=len(ends)))
        size, count = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
        cuts.append(Cut(ends=ends, clusters=clusters, micro_batches=count, size=size))
    model = write_config(tmp_path_factory.mktemp("model"), "llama-tied")
    plan = make_plan(cuts, LENGTH, schedule=data.draw(st.sampled_from(["1f1b", "gpipe", "overlapped"])))
    training = make_training(steps=2, global_batch_size=plan.num_samples, micro_batch_size=1)
    alone = make_plan([Cut(ends=[4], clusters="a", micro_batches=plan.num_samples, size=1)], LENGTH)
    close(curve(model, plan, training), curve(model, alone, training), 1e-5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5), st.integers(1, 99))
def test_each_sample_is_one_replicas(each: list[tuple[int, int]], num_samples: int) -> None:
    """A step's samples are dealt as the plan says, another batch's in the same shares: each sample once."""
    plan = make_plan([Cut(ends=[4], clusters="a", micro_batches=m, size=b) for m, b in each], LENGTH)
    for size in (plan.num_samples, num_samples):
        rows = [replica_samples(plan, replica, size) for replica in range(plan.dp)]
        assert [row for first, last in rows for row in range(first, last)] == list(range(size))
    own = [last - first for first, last in (replica_samples(plan, r, plan.num_samples) for r in range(plan.dp))]
    assert own == [m * b for m, b in each]


def test_a_rank_knows_its_pipeline() -> None:
    """Ranks are numbered by cluster; a place names those of its own replica."""
    plan = make_plan(UNLIKE, LENGTH)
    assert PipelinePosition.of_rank(plan, 3) == PipelinePosition(replica=1, stage=1, ranks=(1, 3, 4))
    assert PipelinePosition.of_rank(plan, 5) == PipelinePosition(replica=2, stage=0, ranks=(5,))
