"""`Optimizer`: AdamW with warm-up and cosine decay, clipped by the gradient norm of the whole model.

Precision `bf16`: the model computes with bf16 copies; weights, accumulated gradients and moments are fp32
(18 bytes a parameter). Precision `fp32`: the model's own parameters are the weights (16 bytes a parameter).
Where updates are shared among replicas (`Ownership`), weights and moments are those of this rank's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from isthmus.core.errors import UnavailableError
from isthmus.core.job import Training
from isthmus.train.pinned import host_copies, host_room
from isthmus.train.update.buckets import Segment
from isthmus.train.update.ownership import Ownership, Rows
from isthmus.train.update.reduce import Reducer

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
    weights, moments and update counts stay, the gradients are dropped, rate and data go on. `loss` is the
    sum over all ranks of what they gave.
    """

    gradient_norm: float
    learning_rate: float
    skipped: bool
    loss: float


@dataclass(frozen=True)
class _Share:
    """Rows of a parameter that are updated here, and their fp32 weight: the parameter's own memory or not."""

    name: str
    rows: Rows
    weight: nn.Parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of the rank's own `tensor`: a view."""
        return _view(tensor, self.rows)


class Optimizer:
    """The weights of one stage and their update.

    `parameters` are (name in the whole model, parameter of the stage, in fp32); with bf16 they become bf16.
    `ownership` says what is shared with other ranks, whose gradients `reducer` adds (without: nothing is).
    `sum_over_all` adds numbers (float64) over all ranks, so that all clip by the same norm. `on_host` keeps
    fp32 weights and moments in host memory, and updates there: gradients come, new weights go back. On a CPU
    it does the same, with copies of their own. Source: J. Ren et al., "ZeRO-Offload: Democratizing
    Billion-Scale Model Training", USENIX ATC 2021, section 4.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        training: Training,
        *,
        sum_over_all: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        ownership: Ownership | None = None,
        reducer: Reducer | None = None,
        on_host: bool = False,
    ) -> None:
        self._training, self._sum_over_all, self._reducer = training, sum_over_all, reducer
        self._working = dict(parameters)
        self._on_host = on_host
        shapes = {name: parameter.shape for name, parameter in self._working.items()}
        self._ownership = ownership or Ownership.alone(shapes)
        self._gathered: Tensors = {}
        self._shares: list[_Share] = []
        for name, parameter in self._working.items():
            for rows in self._ownership.updated.get(name, ()):
                self._shares.append(_Share(name, rows, self._weight(parameter, rows)))
            if training.precision != "fp32":
                self._lower(name, parameter)
        groups: list[dict[str, object]] = [
            {
                "params": [one.weight for one in self._shares if one.weight.dim() > 1],
                "weight_decay": training.weight_decay,
            },
            {"params": [one.weight for one in self._shares if one.weight.dim() <= 1], "weight_decay": 0.0},
        ]
        nothing: dict[str, object] = {"params": [nn.Parameter(torch.zeros(0))]}  # for a rank without a share
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [nothing],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            fused=True,
        )

    @property
    def names(self) -> frozenset[str]:
        """Names in the whole model of what the stage holds."""
        return frozenset(self._working)

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return the gradient (fp32) gathered so far of one of the stage's parameters, None without any."""
        if self._training.precision == "fp32":
            return self._working[name].grad
        return self._gathered.get(name)

    def apply(self, step: int, loss: float = 0.0) -> Update:
        """Update the weights by the gradients accumulated since the last call; `step` counts from 0.

        `loss` is this rank's part of what the step cost.
        """
        if self._reducer is not None:
            self._fill_shared()
            self._reducer.reduce(self._gradient_of, everywhere=not self._ownership.shard)
        mine = torch.tensor([self._sum_of_squares(), loss], dtype=torch.float64)
        squares, total_loss = self._sum_over_all(mine).tolist()
        norm, rate = math.sqrt(squares), learning_rate(self._training, step)
        if math.isfinite(norm):
            self._clip(norm)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self._refresh()
        self.drop_gradients()
        return Update(norm, rate, skipped=not math.isfinite(norm), loss=total_loss)

    def state(self) -> Tensors:
        """Return weights, moments and update counts, named `kind/name in the whole model`.

        They are of the rows that are updated here, one behind the other.
        """
        tensors: Tensors = {}
        for name, rows in self._ownership.updated.items():
            shares = [one for one in self._shares if one.name == name]
            states = [self._adam.state.get(one.weight) or _fresh(one.weight) for one in shares]
            tensors[f"step/{name}"] = states[0]["step"]
            tensors[f"weight/{name}"] = _behind_each_other([one.weight.detach() for one in shares], rows)
            for moment in _MOMENTS:
                tensors[f"{moment}/{name}"] = _behind_each_other([one[moment] for one in states], rows)
        return tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the state of all that the stage holds, named as by `state`, each tensor whole.

        Raises `UnavailableError` where a tensor has another shape.
        """
        for name, working in self._working.items():
            found = tensors[f"weight/{name}"].shape
            if found != working.shape:
                raise UnavailableError(
                    f"the checkpoint holds '{name}' as {list(found)}, the model as {list(working.shape)}",
                    hint="it is of another model; name another checkpoint folder",
                )
            working.detach().copy_(tensors[f"weight/{name}"])
        for one in self._shares:
            one.weight.detach().copy_(one.of(tensors[f"weight/{one.name}"]))
            self._adam.state[one.weight] = {
                "step": tensors[f"step/{one.name}"].to(one.weight.device, copy=True),
                **{
                    moment: one.of(tensors[f"{moment}/{one.name}"]).to(one.weight.device).clone()
                    for moment in _MOMENTS
                },
            }

    def own_state(self) -> Tensors:
        """Return all that this rank needs to go on by itself: what it computes with, and what it updates."""
        tensors = {f"working/{name}": one.detach() for name, one in self._working.items()}
        for number, one in enumerate(self._shares):
            state = self._adam.state.get(one.weight) or _fresh(one.weight)
            tensors |= {f"{kind}/{number}": state[kind] for kind in ("step", *_MOMENTS)}
            if one.of(self._working[one.name]).data_ptr() != one.weight.data_ptr():
                tensors[f"weight/{number}"] = one.weight.detach()
        return tensors

    def load_own(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go back to what `own_state` was, in this process or in one before it."""
        for name, working in self._working.items():
            working.detach().copy_(tensors[f"working/{name}"])
        for number, one in enumerate(self._shares):
            if f"weight/{number}" in tensors:
                one.weight.detach().copy_(tensors[f"weight/{number}"])
            self._adam.state[one.weight] = {
                kind: tensors[f"{kind}/{number}"].to(one.weight.device, copy=True)
                for kind in ("step", *_MOMENTS)
            }

    def _weight(self, parameter: nn.Parameter, rows: Rows) -> nn.Parameter:
        """Return the weight behind some rows of a parameter (fp32): its own memory while it stays fp32."""
        if self._on_host:
            return nn.Parameter(host_copies([_view(parameter.detach(), rows)])[0])
        whole, keeps = rows.num_rows == parameter.shape[rows.dim], self._training.precision == "fp32"
        if whole and keeps:
            return parameter
        view = _view(parameter.detach(), rows)
        if whole or (keeps and view.is_contiguous()):
            return nn.Parameter(view)
        return nn.Parameter(view.clone(memory_format=torch.contiguous_format))

    def _lower(self, name: str, parameter: nn.Parameter) -> None:
        """Make a parameter bf16, whose gradients are gathered in fp32."""
        parameter.data = parameter.data.to(torch.bfloat16)

        def gather(working: torch.Tensor) -> None:
            if working.grad is not None:
                if name in self._gathered:
                    self._gathered[name].add_(working.grad)
                else:
                    self._gathered[name] = working.grad.float()
                working.grad = None

        parameter.register_post_accumulate_grad_hook(gather)

    def _refresh(self) -> None:
        """Let the model compute with the new weights, those that others have updated as well."""
        for one in self._shares:
            working = one.of(self._working[one.name].detach())
            if working.data_ptr() == one.weight.data_ptr():
                continue
            new = one.weight.detach()
            if working.is_cuda and not new.is_cuda:  # rounded before it crosses
                new = host_room(working).copy_(new)
            working.copy_(new)
        if self._reducer is not None and self._ownership.shard:
            self._reducer.spread(self._working_of)

    def _working_of(self, segment: Segment) -> torch.Tensor:
        return _view(self._working[segment.name].detach(), self._ownership.place(segment))

    def _gradient_of(self, segment: Segment) -> torch.Tensor:
        gradient = self.gradient(segment.name)
        if gradient is None:
            raise KeyError(f"no gradient of {segment.name}")
        return _view(gradient, self._ownership.place(segment))

    def _fill_shared(self) -> None:
        """Give what others may have a gradient of one here as well."""
        for name in self._ownership.shared_names:
            if self.gradient(name) is None:
                zeros = torch.zeros_like(self._working[name], dtype=torch.float32)
                if self._training.precision == "fp32":
                    self._working[name].grad = zeros
                else:
                    self._gathered[name] = zeros

    def _sum_of_squares(self) -> float:
        """Return the squared norm (fp64) of the segments that are counted here, one by one.

        These do not depend on whether updates are shared, nor do the bits.
        """
        counted = [one for one in self._ownership.counted if self.gradient(one.name) is not None]
        if not counted:
            return 0.0
        norms = torch._foreach_norm([self._gradient_of(one) for one in counted], 2, dtype=torch.float64)
        return float(torch.stack(norms).square().sum())

    def _clip(self, norm: float) -> None:
        """Hand each weight its gradient, scaled so that the norm is at most `clip_norm`; 0 is no limit."""
        parts = [
            (one.weight, one.of(gradient))
            for one in self._shares
            if (gradient := self.gradient(one.name)) is not None and one.weight is not self._working[one.name]
        ]
        copies = (
            host_copies([part for _, part in parts]) if self._on_host else [p.contiguous() for _, p in parts]
        )
        for (weight, _), copy in zip(parts, copies, strict=True):
            weight.grad = copy
        limit = self._training.clip_norm
        gradients = [one.weight.grad for one in self._shares if one.weight.grad is not None]
        if gradients and 0 < limit < norm:
            torch._foreach_mul_(gradients, limit / norm)

    def drop_gradients(self) -> None:
        """Forget the gradients gathered so far."""
        self._gathered.clear()
        for parameter in (*self._working.values(), *(one.weight for one in self._shares)):
            parameter.grad = None


def _view(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    return tensor.narrow(rows.dim, rows.at, rows.num_rows)


def _behind_each_other(parts: list[torch.Tensor], rows: tuple[Rows, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, rows[0].dim)


def _fresh(weight: torch.Tensor) -> Tensors:
    return {
        "step": torch.zeros((), device=weight.device),
        **{moment: torch.zeros_like(weight) for moment in _MOMENTS},
    }
