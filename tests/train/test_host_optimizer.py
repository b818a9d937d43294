"""Rules of an optimizer in host memory: the same bits, and nothing of it on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.core.errors import PlanError
from isthmus.core.job import TrainingConfig
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.update.buckets import HeldRows
from isthmus.train.update.optimizer import Optimizer
from isthmus.train.update.ownership import Ownership
from tests.train.devices import needs_gpu, on_devices
from tests.train.worker_jobs import make_job, make_plan


def make(
    precision: str, seed: int = 0, device: str = "cpu", **options: object
) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """Return an optimizer of a matrix and a vector drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {"a": torch.randn(6, 4, generator=generator), "b": torch.randn(5, generator=generator)}
    parameters = {name: nn.Parameter(value.to(device)) for name, value in drawn.items()}
    training = TrainingConfig(steps=100, precision=precision, learning_rate=0.1, clip_norm=0.5)
    return Optimizer(parameters.items(), training, **options), parameters


def run(optimizer: Optimizer, parameters: dict[str, nn.Parameter], steps: range) -> list[float]:
    """Update by gradients that depend on the step alone; return the norms."""
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        drawn = [torch.randn(one.shape, generator=generator) for one in parameters.values()]
        loss = sum((a * b.to(a.device)).sum() for a, b in zip(parameters.values(), drawn, strict=True))
        loss.backward()
        norms.append(optimizer.apply(step).gradient_norm)
    return norms


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_makes_the_same_bits(precision: str) -> None:
    """Norms and weights are those of an optimizer beside the model, clipped steps included."""
    usual, there = make(precision), make(precision, on_host=True)
    assert run(*usual, range(5)) == run(*there, range(5))
    assert all(torch.equal(one, there[1][name]) for name, one in usual[1].items())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_makes_the_numbers_of_a_card(precision: str) -> None:
    """Beside a card a processor rounds otherwise: the same norms and weights to a few last places."""
    usual, there = make(precision, device="cuda"), make(precision, device="cuda", on_host=True)
    assert run(*there, range(5)) == pytest.approx(run(*usual, range(5)), rel=1e-4)
    least = 1e-5 if precision == "fp32" else 2**-8
    assert all(torch.allclose(one, there[1][name], rtol=least) for name, one in usual[1].items())
    assert all(one.device.type == "cpu" for one in there[0].checkpoint_state().values())
    assert all(one.is_pinned() for name, one in there[0].checkpoint_state().items() if name.startswith("weight/"))


@on_devices
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_of_it_is_the_models(precision: str, device: str) -> None:
    """Weights, moments and gradients that are updated are copies: the device holds none of their memory."""
    optimizer, parameters = make(precision, device=device, on_host=True)
    handed: list[torch.Tensor] = []

    def note(adam: torch.optim.Optimizer, *_: object) -> None:
        handed.extend(one.grad for group in adam.param_groups for one in group["params"])

    optimizer.adam.register_step_pre_hook(note)
    run(optimizer, parameters, range(2))
    models = {one.untyped_storage().data_ptr() for one in parameters.values()}
    held = [*optimizer.checkpoint_state().values(), *handed]
    assert held
    assert not models & {one.untyped_storage().data_ptr() for one in held}
    assert {one.dtype for one in held} == {torch.float32}


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False)])
def test_its_state_moves_to_and_from_the_device(first: bool, second: bool) -> None:
    """A run that was saved with the optimizer on one side goes on with it on the other, bit for bit."""
    straight = make("bf16")
    run(*straight, range(6))
    before, after = make("bf16", on_host=first), make("bf16", seed=1, on_host=second)
    run(*before, range(3))
    after[0].load_checkpoint_state(before[0].checkpoint_state())
    run(*after, range(3, 6))
    assert all(torch.equal(one, after[1][name]) for name, one in straight[1].items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_snapshot_has_the_weights_wherever_they_are_updated(precision: str) -> None:
    """A snapshot of an optimizer on the device is taken over by one in host memory, bit for bit."""
    before, after = make(precision), make(precision, seed=1, on_host=True)
    run(*before, range(3))
    after[0].load_local_state(before[0].local_state())
    assert all(torch.equal(one, after[1][name]) for name, one in before[1].items())


def test_a_plan_without_it_is_refused_to_a_job_that_asks(tmp_path: Path) -> None:
    """A job that needs the room is not started on a plan that takes it; a plan may ask by itself."""
    job = make_job(tmp_path, training={"optimizer_on_host": True})
    without = make_plan(job, [1, 4])
    asks = without.model_copy(update={"optimizer_on_host": True})
    with pytest.raises(PlanError, match="optimizer_on_host is False in the plan and True in the job"):
        check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=without))
    check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=asks))
    check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=make_job(tmp_path), plan=asks))


def test_a_share_of_it_is_on_the_host() -> None:
    """With ZeRO 1 the rows that this rank updates are kept there, and no others."""
    held = [[HeldRows.full("a", (6, 4)), HeldRows.full("b", (5,))]] * 2
    ownership = Ownership(held, 0, ["x", "x"], shard_updates=True, bucket_elements=16)
    optimizer, parameters = make("fp32", on_host=True, ownership=ownership)
    before = {name: one.detach().clone() for name, one in parameters.items()}
    run(optimizer, parameters, range(1))
    updated = {name: sum(rows.num_rows for rows in of_name) for name, of_name in ownership.updated_rows.items()}
    assert {name: len(optimizer.checkpoint_state()[f"weight/{name}"]) for name in updated} == updated
    changed = (parameters["a"].detach() != before["a"]).any(1)
    assert int(changed.sum()) == updated.get("a", 0)
