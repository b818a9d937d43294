"""Rules of the optimiser: rate, clipping, decay, precision, and state that moves between cuts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.core.errors import UnavailableError
from isthmus.core.job import TrainingConfig
from isthmus.train.update.learning_rate import learning_rate
from isthmus.train.update.optimizer import Optimizer


def make_training(**changes: object) -> TrainingConfig:
    """Return hyper-parameters that make one update easy to foresee."""
    return TrainingConfig.model_validate({"steps": 100, "precision": "fp32", "learning_rate": 0.1} | changes)


def make(training: TrainingConfig, **weights: torch.Tensor) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """Return an optimiser of parameters with the given values."""
    parameters = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    return Optimizer(parameters.items(), training), parameters


@given(st.integers(0, 20), st.integers(1, 80))
def test_the_rate_rises_then_falls(warmup_steps: int, decay_steps: int) -> None:
    """The rate rises linearly to the peak, then falls to the minimum, and never leaves the two."""
    training = make_training(
        steps=warmup_steps + decay_steps, warmup_steps=warmup_steps, learning_rate=1.0, min_learning_rate=0.1
    )
    rates = [learning_rate(training, step) for step in range(training.steps)]
    assert rates[:warmup_steps] == pytest.approx([(i + 1) / warmup_steps for i in range(warmup_steps)])
    falling = rates[warmup_steps:]
    assert falling[0] == 1.0
    assert falling == sorted(falling, reverse=True)
    assert learning_rate(training, training.steps) == pytest.approx(0.1)


def test_gradients_are_clipped_to_the_norm_of_the_whole_model() -> None:
    """The norm is the root of the sum of squares over all stages, and scales this stage's part."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = Optimizer(
        [("w", parameter)],
        make_training(clip_norm=1.0),
        sum_over_all=lambda mine: mine + torch.tensor([12.0, 0.0]),
    )
    parameter.grad = torch.ones(2, 2)
    seen = []
    optimizer.adam.register_step_pre_hook(lambda *_: seen.append(parameter.grad.clone()))
    update = optimizer.apply(0)
    assert update.gradient_norm == pytest.approx(4.0)
    assert seen[0] == pytest.approx(torch.full((2, 2), 0.25))
    assert parameter.grad is None


@pytest.mark.parametrize("clip_norm", [0.0, 100.0])
def test_small_gradients_are_left_alone(clip_norm: float) -> None:
    """Below the limit, and with the limit 0, nothing is scaled."""
    optimizer, parameters = make(make_training(clip_norm=clip_norm), w=torch.zeros(2, 2))
    parameters["w"].grad = torch.full((2, 2), 3.0)
    seen = []
    optimizer.adam.register_step_pre_hook(lambda *_: seen.append(float(parameters["w"].grad[0, 0])))
    optimizer.apply(0)
    assert seen == [3.0]


def test_norms_and_biases_do_not_decay() -> None:
    """Weight decay shrinks matrices and leaves vectors as they are."""
    optimizer, parameters = make(make_training(weight_decay=0.5), matrix=torch.ones(2, 2), norm=torch.ones(2))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.apply(0)
    assert float(parameters["matrix"].detach()[0, 0]) == pytest.approx(1 - 0.1 * 0.5)
    assert float(parameters["norm"].detach()[0]) == 1.0


def test_an_infinite_gradient_changes_nothing() -> None:
    """An update whose norm is not finite is skipped and said so; the next one is as if it had not been."""
    optimizer, parameters = make(make_training(), w=torch.ones(2, 2))
    parameters["w"].grad = torch.full((2, 2), math.inf)
    update = optimizer.apply(0)
    assert update.skipped
    assert torch.equal(parameters["w"].detach(), torch.ones(2, 2))
    parameters["w"].grad = torch.ones(2, 2)
    assert not optimizer.apply(1).skipped


def test_nothing_to_learn_is_a_norm_of_zero() -> None:
    """Without any gradient the norm is 0 and nothing fails, also where weights decay."""
    optimizer, parameters = make(make_training(weight_decay=0.5), w=torch.ones(2, 2))
    update = optimizer.apply(0)
    assert (update.gradient_norm, update.skipped) == (0.0, False)
    assert torch.equal(parameters["w"].detach(), torch.ones(2, 2))


def test_bf16_gathers_gradients_in_fp32() -> None:
    """Small gradients of many micro-batches add up in fp32, where a bf16 sum would not have changed."""
    parameter = nn.Parameter(torch.ones(1, 1))
    optimizer = Optimizer([("w", parameter)], make_training(precision="bf16"))
    assert parameter.dtype is torch.bfloat16
    for factor in [1.0] + [2.0**-10] * 64:
        (parameter * factor).sum().backward()
    assert optimizer.gradient("w").dtype is torch.float32
    assert float(optimizer.gradient("w")) == 1.0 + 64 * 2.0**-10
    assert parameter.grad is None


def test_bf16_weights_move_by_less_than_their_precision() -> None:
    """The fp32 weight takes steps that its bf16 copy is too coarse to show at once."""
    training = make_training(precision="bf16", learning_rate=1e-4, weight_decay=0.0)
    parameter = nn.Parameter(torch.ones(1, 1))
    optimizer = Optimizer([("w", parameter)], training)
    for step in range(60):
        parameter.sum().backward()
        optimizer.apply(step)
    weight = float(optimizer.checkpoint_state()["weight/w"])
    assert 0.994 < weight < 0.9965
    assert float(parameter.detach()) == pytest.approx(weight, abs=2**-8)


def steps(optimizer: Optimizer, parameters: dict[str, nn.Parameter], first: int, last: int) -> None:
    """Apply updates with gradients that depend on step and name alone."""
    for step in range(first, last):
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(step * 100 + ord(name))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.apply(step)


def test_state_moves_to_another_cut() -> None:
    """Weights and moments of two stages, loaded into one, go on exactly as they would have."""
    training = make_training(clip_norm=0.0)
    values = {"a": torch.ones(2, 2), "b": torch.ones(3)}
    whole, whole_parameters = make(training, **values)
    steps(whole, whole_parameters, 0, 6)

    state: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        stage, parameters = make(training, **{name: value})
        steps(stage, parameters, 0, 3)
        state |= stage.checkpoint_state()
    resumed, parameters = make(training, **{name: torch.zeros_like(value) for name, value in values.items()})
    resumed.load_checkpoint_state(state)
    steps(resumed, parameters, 3, 6)
    for name in values:
        assert torch.equal(parameters[name], whole_parameters[name])


def test_a_state_of_another_shape_is_refused() -> None:
    """A checkpoint of another model is named as such, with both shapes."""
    small, _ = make(make_training(), a=torch.ones(2))
    large, _ = make(make_training(), a=torch.ones(3))
    with pytest.raises(UnavailableError, match=r"'a' as \[2\], the model as \[3\]"):
        large.load_checkpoint_state(small.checkpoint_state())


def test_state_exists_before_the_first_update() -> None:
    """A checkpoint of a weight that was never updated restores to a fresh start."""
    optimizer, parameters = make(make_training(), a=torch.ones(2))
    other, others = make(make_training(), a=torch.zeros(2))
    other.load_checkpoint_state(optimizer.checkpoint_state())
    steps(optimizer, parameters, 0, 2)
    steps(other, others, 0, 2)
    assert torch.equal(parameters["a"], others["a"])
