"""Inside a cluster, stage boundaries and gradients go from device to device: no copy in host memory, the same bits.

The device is a stand-in: CPU tensors that a fake library moves as late as it may, and copies to and from the host that
are counted and end late.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.core.errors import PeerError
from isthmus.train.communication.host_staging import HostStaging
from tests.train.device_groups import device_groups, fake_device
from tests.train.late_copies import LateCopies
from tests.train.replica_threads import Cut, Replicas, curve, make_plan
from tests.train.small_models import write_config
from tests.train.test_context_training import shared
from tests.train.test_executor import losses
from tests.train.test_executor import make_training as pipeline_training
from tests.train.test_expert_training import changed
from tests.train.test_replicas import LENGTH, make_training

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

STEPS = 3
ALONE = [Cut(ends=[4], clusters="a", micro_batches=2, size=1)] * 4
PIPELINES = [Cut(ends=[2, 4], clusters="aa", micro_batches=4, size=1)] * 2
FAR = [Cut(ends=[1, 4], clusters=one, micro_batches=4, size=1) for one in ("aa", "bb")]
CROSSING = [Cut(ends=[2, 4], clusters="ab", micro_batches=4, size=1)] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "overlapped", "zero_bubble", "interleaved"])
def test_boundaries_in_a_cluster_pass_no_host_memory(schedule: str, tmp_path: Path) -> None:
    """Under every schedule, whatever the order of its messages: the curve of a run on the host, bit by bit."""
    model, training = write_config(tmp_path, "llama-tied"), pipeline_training(steps=STEPS)
    more: dict[str, Any] = {"chunks": 2} if schedule == "interleaved" else {}
    ends = [1, 2, 3, 4] if schedule == "interleaved" else [2, 4]
    expected = losses(model, ends, training, schedule, clusters="aa", **more)
    vendor, memory = fake_device()
    copies, groups = LateCopies(), device_groups("aa", vendor)
    found = losses(model, ends, training, schedule, clusters="aa", groups=groups, staging=HostStaging(copies), **more)
    assert found == expected
    assert copies.told == []
    assert memory.host_copies == 0


def test_only_what_another_cluster_receives_is_copied(tmp_path: Path) -> None:
    """Of two boundaries one crosses: a copy out and one in for each of its messages."""
    model, training = write_config(tmp_path, "llama"), pipeline_training(steps=STEPS)
    expected = losses(model, [1, 2, 4], training, clusters="aab")
    vendor, memory = fake_device()
    copies, groups = LateCopies(), device_groups("aab", vendor)
    found = losses(model, [1, 2, 4], training, clusters="aab", groups=groups, staging=HostStaging(copies))
    assert found == expected
    messages = 2 * STEPS * training.num_micro_batches
    assert sum(kind == "copy" for kind, _ in copies.told) == 2 * messages
    assert memory.host_copies == 0


CASES: list[tuple[str, Sequence[Cut], dict[str, Any]]] = [
    ("llama", ALONE, {}),
    ("llama-tied", PIPELINES, {"zero": 1, "schedule": "zero_bubble"}),
    ("qwen3", PIPELINES, {"overlap_gradients": True}),
    ("llama-tied", PIPELINES, {"zero": 3, "schedule": "gpipe"}),
    ("mixtral", ALONE, {"zero": 2}),
    ("llama", [Cut(ends=[2, 4], clusters="aa", micro_batches=4, size=1)], {"schedule": "dualpipe"}),
    ("llama-tied", FAR, {"zero": 1}),
    ("llama", CROSSING, {"zero": 2}),
]


@pytest.mark.parametrize(("variant", "cuts", "changes"), CASES)
def test_gradients_in_a_cluster_pass_no_host_memory(
    variant: str, cuts: Sequence[Cut], changes: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    """Each kind of reduction has the losses and norms of one on the host; copies are for other clusters alone."""
    if not (whole or (variant, cuts, changes) in CASES[1::2]):
        pytest.skip("with --whole")
    model, training = write_config(tmp_path, variant), make_training()
    plan = make_plan(cuts, LENGTH, **changes)
    clusters = "".join(plan.rank_clusters)
    vendor, memory = fake_device()
    copies, groups = LateCopies(), device_groups(clusters, vendor)
    found = curve(model, plan, training, STEPS, groups=groups, staging=HostStaging(copies))
    assert found == curve(model, plan, training, STEPS)
    has_far_boundary = any(len(set(cut.clusters)) > 1 for cut in cuts)
    has_far_sums = len({cluster for cut in cuts for cluster in cut.clusters[:1]}) > 1
    assert bool(copies.told) is has_far_boundary
    assert (memory.host_copies > 0) is has_far_sums


@pytest.mark.parametrize(
    ("variant", "stages"),
    [
        ("llama", [{"cp": 2, "cp_kind": "ring"}]),
        ("qwen3", [{"cp": 4, "cp_kind": "gather"}]),
        ("llama-tied", [{"cp": 2, "cp_kind": "all_to_all"}]),
        ("mixtral", [{"cp": 2, "ep": 2}]),
    ],
)
def test_shared_sequences_and_experts_pass_no_host_memory(
    variant: str, stages: list[dict[str, Any]], whole: bool, tmp_path: Path
) -> None:
    """Blocks of keys, heads, and rows of experts go from device to device, gradients too: the same bits."""
    if not (whole or stages[0].get("cp_kind") == "ring" or "ep" in stages[0]):
        pytest.skip("with --whole")
    model, training = write_config(tmp_path, variant), pipeline_training(steps=2)
    expected = shared(model, [4], stages, training)
    vendor, memory = fake_device()
    copies, groups = LateCopies(), partial(device_groups, vendor=vendor)
    found = shared(model, [4], stages, training, groups=groups, staging=HostStaging(copies))
    assert found == expected
    assert copies.told == []
    assert memory.host_copies == 0
    assert memory.num_kept > 0


def test_replicas_share_experts_from_device_to_device(tmp_path: Path) -> None:
    """The ranks of a group are those of two replicas."""
    model, training = write_config(tmp_path, "mixtral"), make_training()
    plan = changed(make_plan(ALONE, LENGTH, zero=3), ep=2)
    vendor, memory = fake_device()
    groups = device_groups("".join(plan.rank_clusters), vendor)
    found = curve(model, plan, training, STEPS, groups=groups, staging=HostStaging(LateCopies()))
    assert found == curve(model, plan, training, STEPS)
    assert memory.host_copies == 0


def lose_rank(groups: Sequence[IsthmusGroup], lost: int, num_messages: int) -> None:
    """Let rank `lost` end when it begins to send its `num_messages`-th message between devices from now on."""
    near, left = groups[lost].device_messages, iter(range(num_messages))
    assert near is not None
    send = near.send

    def send_or_end(*args: Any) -> Any:
        if next(left, None) is None:
            groups[lost].close_with_error("killed")
        return send(*args)

    near.send = send_or_end  # type: ignore[method-assign]


@pytest.mark.parametrize(("lost", "at", "num_messages"), [(0, 1, 2), (3, 2, 0), (1, 0, 6), (2, 1, 9)])
def test_a_lost_rank_fails_the_step_and_the_next_group_goes_on(
    lost: int, at: int, num_messages: int, whole: bool, tmp_path: Path
) -> None:
    """In a boundary or a sum; what waits for it fails at all, and the state before the step gives the same bits."""
    if not (whole or lost in (1, 2)):
        pytest.skip("with --whole")
    model, training = write_config(tmp_path, "llama-tied"), make_training()
    plan = make_plan(PIPELINES, LENGTH, zero=1)
    expected = curve(model, plan, training, STEPS)
    vendor, clusters = fake_device()[0], "".join(plan.rank_clusters)

    def begin() -> Replicas:
        return Replicas(
            model, plan, training, groups=device_groups(clusters, vendor), staging=HostStaging(LateCopies())
        )

    replicas = begin()
    done = replicas.train(at)
    states = [{name: one.clone() for name, one in rank.optimizer.local_state().items()} for rank in replicas.ranks]
    lose_rank(replicas.groups, lost, num_messages)
    with pytest.raises(PeerError):
        replicas.train(STEPS, first=at)
    for group in replicas.groups:
        group.abort()
    again = begin()
    again.restore(states)
    done += again.train(STEPS - at, first=at)
    again.close()
    assert done == expected
