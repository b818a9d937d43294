"""Rules of local steps: replica groups train apart, and an outer optimizer averages their weights every few steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import UnavailableError
from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from isthmus.train.checkpoint.group_states import StateToLoad
from isthmus.train.checkpoint.layout.checkpoint_layout import merge_layouts
from isthmus.train.checkpoint.layout.shard_files import read_shards, write_shards
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.checkpoint.state_shards import shards_to_save
from isthmus.train.update.buckets import HeldRows, make_buckets
from isthmus.train.update.local_steps.make_local_steps import group_shares
from isthmus.train.update.local_steps.outer_buckets import make_outer_buckets
from isthmus.train.update.optimizer import GROUP_SHARES
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.replica_layout import averaged_samples, rank_groups
from tests.train.replica_threads import Cut, Replicas, make_plan
from tests.train.small_models import NUM_LAYERS, write_config
from tests.train.test_state_pieces import SHAPES, Tensors, cuts, own, state_of, whole_state
from tests.train.test_state_pieces import Cut as Cuts
from tests.train.threads import Batch, Pipeline, random_batch

LENGTH, EVERY = 8, 3
APART = (
    Cut(ends=[4], clusters="a", micro_batches=2, size=1),
    Cut(ends=[1, 4], clusters="aa", micro_batches=1, size=2),
    Cut(ends=[2, 4], clusters="bc", micro_batches=2, size=2),
)
"""Two groups: replicas 0 and 1, which share a cluster, with 4 of 8 samples, and replica 2 with 4."""
GROUP_OF_RANK = (0, 0, 0, 1, 1)


def training_of(**changes: Any) -> TrainingConfig:
    fields = {
        "steps": 8, "sequence_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 8, "local_steps": EVERY,
        "learning_rate": 3e-3, "warmup_steps": 2, "precision": "fp32", "clip_norm": 0.5,
    }  # fmt: skip
    return TrainingConfig.model_validate(fields | changes)


@contextmanager
def replicas_of(model: Path, training: TrainingConfig, **changes: Any) -> Iterator[Replicas]:
    plan = make_plan(APART, LENGTH, local_steps=EVERY, **changes)
    assert rank_groups(plan) == GROUP_OF_RANK
    with closing(Replicas(model, plan, training)) as found:
        yield found


def part_of(plan: Plan, training: TrainingConfig, group: int) -> Batch:
    """Return the samples of a group in each step."""
    replica = plan.replica_groups.index(group)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = random_batch(training, step)
        ranges = averaged_samples(plan, replica, training.global_batch_size)
        ids, labels = (torch.cat([one[first:end] for first, end in ranges]) for one in whole)
        return ids, labels

    return batch


def reference(model: Path, plan: Plan, training: TrainingConfig) -> tuple[list[float], Tensors]:
    """Train each group in a process of its own, with an outer SGD of torch; return losses and weights."""
    shares, done = group_shares(plan), plan.local_steps
    sizes = [round(share * training.global_batch_size) for share in shares]
    runs = [Pipeline(model, [NUM_LAYERS], training.model_copy(update={"global_batch_size": one})) for one in sizes]
    outer = {name: torch.nn.Parameter(one) for name, one in runs[0].weights().items()}
    sgd = torch.optim.SGD(
        list(outer.values()),
        training.outer_learning_rate,
        training.outer_momentum,
        nesterov=training.outer_momentum > 0,
    )
    for step in range(training.steps):
        for group, run in enumerate(runs):
            run.train(1, first=step, batch=part_of(plan, training, group))
        if (step + 1) % done and step + 1 < training.steps:
            continue
        found = [run.weights() for run in runs]
        for name, one in outer.items():
            one.grad = sum(share * (one.detach() - each[name]) for share, each in zip(shares, found, strict=True))
        sgd.step()
        for run in runs:
            (stage,) = run.stages
            state = {name: one.clone() for name, one in stage.optimizer.checkpoint_state().items()}
            stage.optimizer.load_checkpoint_state(
                state | {f"weight/{name}": one.detach() for name, one in outer.items()}
            )
    losses = [
        sum(share * run.stages[0].losses[step] for share, run in zip(shares, runs, strict=True))
        for step in range(training.steps)
    ]
    for run in runs:
        run.close()
    return losses, {name: one.detach() for name, one in outer.items()}


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("variant", "zero", "outer"),
    [("llama-tied", 0, {}), ("mixtral", 1, {}), ("llama", 1, {"outer_learning_rate": 1.0, "outer_momentum": 0.0})],
)
def test_groups_train_what_runs_with_an_outer_sgd_train(
    variant: str, zero: int, outer: dict[str, float], tmp_path: Path
) -> None:
    """Unlike replicas in two groups: losses and weights of two separate runs whose weights torch's SGD averages."""
    model, training = write_config(tmp_path, variant), training_of(**outer)
    with replicas_of(model, training, zero=zero) as replicas:
        losses, weights = reference(model, replicas.plan, training)
        found = replicas.train(training.steps)
        assert [one.loss for one in found] == pytest.approx(losses, rel=1e-5)
        for rank in range(len(GROUP_OF_RANK)):
            for name, tensor in replicas.weights(rank).items():
                torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_differ_between_averages_and_have_the_same_bits_after_one(precision: str, tmp_path: Path) -> None:
    """After two of three steps the groups hold unlike weights, after three all ranks hold the same; ZeRO-1 as well."""
    model, training = write_config(tmp_path, "llama-tied"), training_of(precision=precision)
    last = {}
    for zero, steps in ((0, EVERY - 1), (0, EVERY), (1, EVERY)):
        with replicas_of(model, training, zero=zero) as replicas:
            replicas.train(steps)
            first = {name: one.clone() for name, one in replicas.weights(0).items()}
            for rank, group in enumerate(GROUP_OF_RANK):
                for name, tensor in replicas.weights(rank).items():
                    alike = torch.equal(tensor, first[name])
                    assert alike or (steps < EVERY and group == 1), (rank, name)
            others = chain(replicas.weights(3).items(), replicas.weights(4).items())
            assert all(torch.equal(one, first[name]) for name, one in others) == (steps == EVERY)
            last[zero, steps] = first
    for name, tensor in last[0, EVERY].items():
        assert torch.equal(tensor, last[1, EVERY][name])


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("zero", [0, 1])
def test_a_state_between_averages_goes_on_with_the_same_bits(zero: int, tmp_path: Path) -> None:
    """After five steps, three of them local, new optimizers take each rank's state, and end with the same bits."""
    model, training = write_config(tmp_path, "llama-tied"), training_of()
    with replicas_of(model, training, zero=zero) as straight, replicas_of(model, training, zero=zero) as resumed:
        straight.train(5)
        states = [{name: one.clone() for name, one in rank.optimizer.local_state().items()} for rank in straight.ranks]
        expected = straight.train(3, first=5)
        assert any(name.startswith("outer_momentum/") for name in states[0])
        resumed.restore(states)
        assert resumed.train(3, first=5) == expected
        for rank in range(len(GROUP_OF_RANK)):
            for name, tensor in straight.weights(rank).items():
                assert torch.equal(tensor, resumed.weights(rank)[name])


@st.composite
def grouped_cuts(draw: st.DrawFn, least: int, most: int) -> list[Cuts]:
    """What the ranks of each group hold; a parameter is cut along one dimension in all of them."""
    dims = {name: draw(st.integers(0, len(shape) - 1)) for name, shape in SHAPES.items()}
    return [draw(cuts(dims)) for _ in range(draw(st.integers(least, most)))]


@settings(max_examples=30, deadline=None)
@given(written=grouped_cuts(2, 3), shard=st.booleans())
def test_one_rank_of_each_group_contributes_every_row(written: list[Cuts], shard: bool) -> None:
    """Whatever the groups hold: the owners of a row are those that update it, and each group adds it once."""
    held, groups, clusters = joined(written)
    inner = make_buckets(held, clusters, 32, groups=groups)
    outer = make_outer_buckets(inner, clusters, shard_updates=shard, bucket_elements=32)
    assert all(len({groups[rank] for rank in chain(*one.owners)}) == 1 for one in inner)

    def by_row(buckets: Any, ranks: Any) -> dict[tuple[str, int], set[int]]:
        found: dict[tuple[str, int], set[int]] = {}
        for bucket in buckets:
            for one in bucket.segments:
                for row in range(one.start, one.stop):
                    found.setdefault((one.name, one.dim, row), set()).update(ranks(bucket))
        return found

    owners = by_row(outer, lambda one: chain(*one.owners))
    assert owners == by_row(inner, lambda one: one.leaders if shard else chain(*one.owners))
    for row, ranks in by_row(outer, lambda one: one.contributors).items():
        assert sorted(groups[rank] for rank in ranks) == sorted({groups[rank] for rank in owners[row]})


def joined(written: list[Cuts]) -> tuple[list[list[HeldRows]], list[int], list[str]]:
    """Return held rows, group and cluster of each rank; the ranks of `written[g]` are group g, in two clusters."""
    groups = [group for group, cut in enumerate(written) for _ in cut]
    clusters = [f"{group}{place % 2}" for group, cut in enumerate(written) for place in range(len(cut))]
    return list(chain(*written)), groups, clusters


def state_of_group(group: int) -> Tensors:
    """Return the state of a group: numbers of its own, and the outer optimizer's, which are alike."""
    state = {name: one if name.startswith("step/") else one + 10_000.0 * group for name, one in whole_state().items()}
    for name in [name for name in state if name.startswith("weight/")]:
        key = name.partition("/")[2]
        state |= {f"outer_weight/{key}": state[name] * 0 + 7, f"outer_momentum/{key}": state[name] * 0 + 9}
    return state


def write_groups(folder: Path, written: list[Cuts], shares: torch.Tensor) -> Any:
    """Write a checkpoint of replica groups; return its layout."""
    held, groups, clusters = joined(written)
    files = []
    for rank, group in enumerate(groups):
        one = Ownership(held, rank, clusters, bucket_elements=32, groups=groups)
        state = state_of(state_of_group(group), one, ("outer_weight", "outer_momentum"))
        shards = [*shards_to_save(state, one)]
        shards += [TensorShard.full(GROUP_SHARES, shares)] if rank == 0 else []
        files += write_shards(folder, rank, shards)
    return merge_layouts(file.shards for file in files)


@settings(max_examples=20, deadline=None)
@given(written=grouped_cuts(2, 2), read=grouped_cuts(1, 3))
def test_each_group_resumes_its_own_state_and_other_numbers_of_groups_their_mean(
    tmp_path_factory: pytest.TempPathFactory, written: list[Cuts], read: list[Cuts]
) -> None:
    """Two groups saved: two groups load each its own, one or three load the mean by samples, under any cut."""
    folder, shares = tmp_path_factory.mktemp("groups"), torch.tensor([0.25, 0.75], dtype=torch.float64)
    layout = write_groups(folder, written, shares)
    held, groups, clusters = joined(read)
    for rank, group in enumerate(groups):
        one = Ownership(held, rank, clusters, bucket_elements=32, groups=groups if len(read) > 1 else ())
        rows = one.held_rows
        shapes = {name: own(whole_state(), f"weight/{name}", rows[name]).shape for name in rows}
        state = StateToLoad(shapes, one, layout.by_tensor())
        read_shards(folder, layout, state.shards)
        found, expected = state.tensors(), whole_state()
        offset = 10_000.0 * group if len(read) == 2 else 7_500.0
        for name in rows:
            assert found[f"step/{name}"] == expected[f"step/{name}"]
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                assert torch.equal(found[f"{kind}/{name}"], own(expected, f"{kind}/{name}", rows[name]) + offset)
            assert (f"outer_weight/{name}" in found) == (len(read) > 1)
            if len(read) > 1:
                assert bool((found[f"outer_weight/{name}"] == 7).all())
                assert bool((found[f"outer_momentum/{name}"] == 9).all())


@pytest.mark.parametrize(
    "shares", [torch.ones(2, 2), torch.ones(0), torch.tensor([0.5, 0.6]), torch.tensor([1.5, -0.5])]
)
def test_forged_shares_are_refused(tmp_path: Path, shares: torch.Tensor) -> None:
    """Shares of no shape, none at all, or such that are no shares, name the checkpoint as damaged."""
    whole = [[HeldRows.full("wide", (7, 3)), HeldRows.full("long", (40,)), HeldRows.full("deep", (5, 2, 4))]]
    layout = write_groups(tmp_path, [whole, whole], shares.double())
    one = Ownership(whole, 0, ["a"])
    shapes = {name: whole_state()[f"weight/{name}"].shape for name in one.held_rows}

    def load() -> None:
        state = StateToLoad(shapes, one, layout.by_tensor())
        read_shards(tmp_path, layout, state.shards)
        state.tensors()

    with pytest.raises(UnavailableError, match="damaged or forged"):
        load()
