"""Rule: over 200 steps every schedule keeps to the loss of one process, dense and with experts.

Relative to it, in fp32: 1e-6 at every step where gradients add up in the order of micro-batches, 1e-4 where
two copies of the model add up their own halves first. In a run of the tests 1F1B with the dense model goes 200
steps, DualPipe with experts 60, the others a few; with `--whole` all go 200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from isthmus.core.job import TrainingConfig
from isthmus.core.plan import Plan
from tests.schedule.wan_orders import wan_orders
from tests.train.replica_threads import Cut, curve, make_plan
from tests.train.small_models import write_config
from tests.train.threads import LONG, SAMPLED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
LENGTH, COUNT = 8, 4
DENSE, EXPERTS = "qwen3-tied-window", "mixtral"


def plan(ends: Sequence[int], **changes: object) -> Plan:
    """Return a pipeline whose stages end at the layers `ends`, in as many clusters."""
    clusters = "abcd"[: len(ends)]
    return make_plan([Cut(ends=ends, clusters=clusters, micro_batches=COUNT, size=1)], LENGTH, **changes)


def losses(model: Path, cut: Plan, steps: int = LONG) -> list[float]:
    """Return the losses of the first steps under a plan."""
    training = TrainingConfig(
        steps=LONG, sequence_length=LENGTH, micro_batch_size=1, global_batch_size=COUNT,
        learning_rate=1e-3, warmup_steps=10, precision="fp32", clip_norm=0.5,
    )  # fmt: skip
    return [one.loss for one in curve(model, cut, training, steps)]


@pytest.fixture(scope="module", params=[DENSE, EXPERTS])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, whole: bool
) -> tuple[str, Path, list[float]]:
    """Return a kind of model, one of it, and the curve of one process as far as a case goes."""
    model = write_config(tmp_path_factory.mktemp("model"), request.param)
    found = losses(model, plan([4]), LONG if whole or request.param == DENSE else SAMPLED)
    assert min(found[-20:]) < 0.9 * found[0]
    return request.param, model, found


@pytest.mark.parametrize(
    ("cut", "rel", "sampled"),
    [
        (plan([1, 4]), 1e-6, DENSE),
        (plan([3, 4], schedule="gpipe"), 1e-6, ""),
        (plan([1, 2, 4], schedule="overlapped"), 1e-6, ""),
        (plan([2, 4], schedule="zero_bubble"), 1e-6, ""),
        (plan([2, 4], schedule="interleaved", chunks=2), 1e-6, ""),
        (plan([1, 2, 4], schedule="searched", orders=[{"stages": wan_orders(3, COUNT)}]), 1e-6, ""),
        (plan([1, 4], schedule="dualpipe"), 1e-4, EXPERTS),
    ],
    ids=lambda one: getattr(one, "schedule", ""),
)
def test_every_schedule_keeps_to_the_curve_of_one_process(
    alone: tuple[str, Path, list[float]], cut: Plan, rel: float, sampled: str, steps_of: Callable[[bool], int]
) -> None:
    """Uneven cuts under each schedule: the same losses."""
    kind, model, expected = alone
    steps = LONG if kind == sampled == DENSE else steps_of(kind == sampled)
    assert losses(model, cut, steps) == pytest.approx(expected[:steps], rel=rel)
