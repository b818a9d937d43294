"""`Optimizer`: AdamW with warm-up and cosine decay, clipped by the gradient norm of the whole model.

Precision `bf16`: the model computes with bf16 copies; weights, accumulated gradients and moments are fp32
(18 bytes a parameter). Precision `fp32`: the model's own parameters are the weights (16 bytes a parameter).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from isthmus.core.errors import UnavailableError
from isthmus.core.job import Training

Tensors = dict[str, torch.Tensor]
_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(training: Training, step: int) -> float:
    """Return the rate of `step` (from 0): linear warm-up, then cosine decay to `min_learning_rate`."""
    peak, floor, warm_up = training.learning_rate, training.min_learning_rate, training.warmup_steps
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = min((step - warm_up) / max(training.steps - warm_up, 1), 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Update:
    """What one update did.

    Where the gradient norm is not finite (an overflow, a NaN loss) it is `skipped` on all stages:
    weights, moments and update counts stay, the gradients are dropped, rate and data go on.
    """

    gradient_norm: float
    learning_rate: float
    skipped: bool


@dataclass(frozen=True)
class Tied:
    """A weight that another stage holds too: how its gradients are added, and which stage counts it."""

    name: str
    sum_gradients: Callable[[torch.Tensor], torch.Tensor]
    counted_elsewhere: bool


class Optimizer:
    """The weights of one stage and their update.

    `parameters` are (name in the whole model, parameter of the stage, in fp32); with bf16 they become bf16.
    `sum_over_all` adds a number over all stages, so that all clip by the same norm.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        training: Training,
        *,
        sum_over_all: Callable[[float], float],
        tied: Tied | None = None,
    ) -> None:
        self._training, self._sum_over_all, self._tied = training, sum_over_all, tied
        self._working = dict(parameters)
        self.weights = {name: self._weight(parameter) for name, parameter in self._working.items()}
        groups = [
            {
                "params": [w for w in self.weights.values() if w.dim() > 1],
                "weight_decay": training.weight_decay,
            },
            {"params": [w for w in self.weights.values() if w.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            fused=True,
        )

    def apply(self, step: int) -> Update:
        """Update the weights by the gradients accumulated since the last call; `step` counts from 0."""
        if self._tied is not None:
            self._share_tied(self._tied)
        norm = math.sqrt(self._sum_over_all(self._sum_of_squares()))
        rate = learning_rate(self._training, step)
        if math.isfinite(norm):
            self._clip(norm)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self._refresh()
        self._adam.zero_grad(set_to_none=True)
        return Update(gradient_norm=norm, learning_rate=rate, skipped=not math.isfinite(norm))

    def state(self) -> Tensors:
        """Return weights, moments and update counts, named `kind/name in the whole model`."""
        tensors: Tensors = {}
        for name, weight in self.weights.items():
            state = self._adam.state.get(weight) or _fresh(weight)
            tensors[f"weight/{name}"] = weight.detach()
            tensors[f"step/{name}"] = state["step"]
            tensors |= {f"{moment}/{name}": state[moment] for moment in _MOMENTS}
        return tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned, of this stage or of others that held the same names.

        Raises `UnavailableError` where a tensor has another shape.
        """
        for name, weight in self.weights.items():
            found = tensors[f"weight/{name}"].shape
            if found != weight.shape:
                raise UnavailableError(
                    f"the checkpoint holds '{name}' as {list(found)}, the model as {list(weight.shape)}",
                    hint="it is of another model; name another checkpoint folder",
                )
            weight.detach().copy_(tensors[f"weight/{name}"])
            self._adam.state[weight] = {
                kind: tensors[f"{kind}/{name}"].to(weight.device, copy=True) for kind in ("step", *_MOMENTS)
            }
        self._refresh()

    def _weight(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 weight behind a parameter; with bf16 its gradients are gathered there."""
        if self._training.precision == "fp32":
            return parameter
        weight = nn.Parameter(parameter.detach().float())
        parameter.data = parameter.data.to(torch.bfloat16)

        def gather(working: torch.Tensor) -> None:
            if working.grad is not None:
                if weight.grad is None:
                    weight.grad = working.grad.float()
                else:
                    weight.grad.add_(working.grad)
                working.grad = None

        parameter.register_post_accumulate_grad_hook(gather)
        return weight

    def _refresh(self) -> None:
        for name, weight in self.weights.items():
            if self._working[name] is not weight:
                self._working[name].detach().copy_(weight.detach())

    def _share_tied(self, tied: Tied) -> None:
        weight = self.weights[tied.name]
        mine = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad = tied.sum_gradients(mine)

    def _sum_of_squares(self) -> float:
        """Return the sum over this stage in fp64, without what another stage counts."""
        elsewhere = self._tied.name if self._tied and self._tied.counted_elsewhere else None
        counted = [
            weight.grad
            for name, weight in self.weights.items()
            if name != elsewhere and weight.grad is not None
        ]
        if not counted:
            return 0.0
        norms = torch._foreach_norm(counted, 2, dtype=torch.float64)
        return float(torch.stack(norms).square().sum())

    def _clip(self, norm: float) -> None:
        """Scale all gradients so that the norm is at most `clip_norm`; 0 means no clipping."""
        limit = self._training.clip_norm
        if 0 < limit < norm:
            gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
            torch._foreach_mul_(gradients, limit / norm)


def _fresh(weight: torch.Tensor) -> Tensors:
    return {
        "step": torch.zeros((), device=weight.device),
        **{moment: torch.zeros_like(weight) for moment in _MOMENTS},
    }
