"""`measure_model_parts`: time the parts of a model separately on one micro-batch.

The parts are two decoder layers (two, so that neither finds its weights in the cache), the embedding, norm
with head and loss, and the optimizer update, without pipeline, messages or data. The time model predicts a
run from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from isthmus.core.errors import InputError
from isthmus.core.job import TrainingConfig
from isthmus.core.model import load_model
from isthmus.plan import ShapeTiming
from isthmus.train.measure.operation_timer import OperationTimer, time_interleaved
from isthmus.train.model.stage_model import StageModel, build_stage
from isthmus.train.update.optimizer import Optimizer

NUM_TIMED_LAYERS = 2
"""Number of decoder layers timed together."""


def measure_model_parts(
    model: str | Path, micro_batch_size: int, sequence_length: int, *, seconds: float
) -> ShapeTiming:
    """Time the parts of `model` on the CPU in fp32, interleaved, each for about `seconds`.

    Raises `ModelError` for a model that cannot be trained and `InputError` for one with fewer than four
    layers (the first and the last are not timed).
    """
    known = load_model(model)
    if known.num_layers < NUM_TIMED_LAYERS + 2:
        raise InputError(
            f"{model} has {known.num_layers} layers", hint=f"use a model with at least {NUM_TIMED_LAYERS + 2}"
        )
    shape, clock = (micro_batch_size, sequence_length), OperationTimer("cpu")
    first, inner, last = (
        build_stage(model, cut, dtype=torch.float32, device="cpu", seed=1, weights="random")
        for cut in ((0, 1), (1, 1 + NUM_TIMED_LAYERS), (known.num_layers - 1, known.num_layers))
    )
    parameters = dict(inner.global_named_parameters())
    alone = {name: nn.Parameter(torch.ones(1)) for name in parameters}
    layers_s, embedding_s, head_s, update_s, step_s = time_interleaved(
        [
            partial(clock.time_s, _layer_pass(inner, shape)),
            partial(clock.time_s, _embedding_pass(first, shape)),
            partial(clock.time_s, _head_pass(last, shape)),
            _update_timer(clock, parameters),
            _update_timer(clock, alone),
        ],
        seconds,
    )
    return ShapeTiming(
        hidden_size=inner.hidden_size,
        vocab_size=inner.vocab_size,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        layer_s=tuple(one / NUM_TIMED_LAYERS for one in layers_s),
        embedding_s=embedding_s,
        head_s=head_s,
        update_s=update_s,
        update_parameters=sum(one.numel() for one in parameters.values()),
        step_s=step_s,
    )


def _layer_pass(stage: StageModel, shape: tuple[int, int]) -> Callable[[], None]:
    """Return a function that runs the layers of `stage` forward and backward; `shape` is (B, S)."""
    hidden, gradient = (torch.randn(*shape, stage.hidden_size) for _ in range(2))
    return lambda: torch.autograd.backward(stage.compute(hidden.clone().requires_grad_())[0], gradient.clone())


def _embedding_pass(stage: StageModel, shape: tuple[int, int]) -> Callable[[], None]:
    tokens, gradient = torch.randint(stage.vocab_size, shape), torch.randn(*shape, stage.hidden_size)
    return lambda: torch.autograd.backward(stage.model.embed_tokens(tokens), gradient)


def _head_pass(stage: StageModel, shape: tuple[int, int]) -> Callable[[], None]:
    hidden, labels = torch.randn(*shape, stage.hidden_size), torch.randint(stage.vocab_size, shape)

    def passes() -> None:
        normed = stage.model.norm(hidden.clone().requires_grad_())
        torch.autograd.backward(stage.loss(normed, labels) / labels.numel())

    return passes


def _update_timer(timer: OperationTimer, parameters: dict[str, nn.Parameter]) -> Callable[[], float]:
    """Return a function that times one optimizer update with gradient norm and clipping, in seconds."""
    training = TrainingConfig(steps=1_000_000, precision="fp32", clip_norm=1e-3)
    optimizer = Optimizer(parameters.items(), training)
    steps = itertools.count()

    def once() -> float:
        for one in parameters.values():
            one.grad = torch.full_like(one, 1e-2)
        return timer.time_s(lambda: optimizer.apply(next(steps)))

    return once
