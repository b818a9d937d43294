"""`Optimizer`: AdamW with warm-up, cosine decay and clipping by the global gradient norm.

Precisions `bf16` and `fp16`: the model computes with working weights of 16 bits; master weights, accumulated
gradients and moments are fp32 (18 bytes per parameter). Precision `fp32`: the model's parameters are the master
weights (16 bytes per parameter). With sharded updates (`Ownership`) a rank has master weights and moments of its
shard only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from isthmus.core.base_model import TrainingPrecision
from isthmus.core.job import TrainingConfig
from isthmus.train.communication.pinned_memory import copy_tensors_to_host, empty_host_tensor
from isthmus.train.kernels.working_precision import WORKING_DTYPES
from isthmus.train.update.accumulation_counts import AccumulationCounts
from isthmus.train.update.buckets import ParameterSegment
from isthmus.train.update.gradient_accumulator import GradientAccumulator
from isthmus.train.update.gradient_reducer import GradientReducer
from isthmus.train.update.learning_rate import learning_rate
from isthmus.train.update.local_steps.outer_optimizer import LocalSteps, OuterOptimizer
from isthmus.train.update.loss_scale import LossScale
from isthmus.train.update.optimizer_state import NamedTensors, OptimizerState
from isthmus.train.update.ownership import Ownership
from isthmus.train.update.sharding.gradient_shards import GradientShards
from isthmus.train.update.sharding.layer_gathering import LayerGathering
from isthmus.train.update.sharding.shard_exchange import ShardExchange, share_values
from isthmus.train.update.sharding.weight_gatherer import WeightGatherer
from isthmus.train.update.weight_shard import WeightShard, make_weight_shards, view_rows

LOSS_SCALE = "loss_scale"
"""Name of the loss scale among the tensors of a state."""

GROUP_SHARES = "group_shares"
"""Name of the shares of the replica groups in a step's samples among the tensors of a checkpoint; fp64 [groups]."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step.

    If the gradient norm is not finite (overflow, NaN loss) all stages skip the update: weights, moments and
    update counts stay, gradients are dropped, learning rate and data advance. With local steps all groups skip it.
    """

    # Norm over the full model, before clipping; with local steps that of this rank's replica group.
    gradient_norm: float
    learning_rate: float
    skipped: bool
    # Sum over all ranks; with local steps the mean of the groups by their samples.
    loss: float
    # That of the step's gradients; 1 if the loss is not scaled.
    loss_scale: float = 1.0


class Optimizer:
    """The weights of one stage and their update.

    `parameters` are (full-model name, fp32 parameter of the stage); in bf16 and fp16 they become 16 bits wide.
    `ownership` says which rows other ranks also own (default: none); `reducer` sums their gradients.
    `sum_over_all` sums a float64 tensor over all ranks, so that all clip by the same norm. `on_host` keeps
    master weights and moments in host memory and updates them there (J. Ren et al., "ZeRO-Offload:
    Democratizing Billion-Scale Model Training", USENIX ATC 2021, section 4); on a CPU it makes separate
    copies. With `overlap_reduction` the reducer sums gradients during the last backward pass, as soon as they are final
    (S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3):
    the same sums. `precision` is that of the stage (default: of the job). With `scales_loss` (default: in fp16)
    gradients are those of the loss times `gradient_scale`, on all ranks. With `exchange` gradients are sharded as the
    update is (`GradientShards`): `reducer` sums over the leaders of clusters, and those in `late` are exchanged once.
    `gathers` shards the model's weights too: `gatherer` gathers them for their use. With `local` the replica groups of
    `ownership` train apart, and average their weights every few steps.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        training: TrainingConfig,
        *,
        sum_over_all: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        ownership: Ownership | None = None,
        reducer: GradientReducer | None = None,
        exchange: ShardExchange | None = None,
        late: Collection[str] = (),
        gathers: bool = False,
        on_host: bool = False,
        overlap_reduction: bool = False,
        precision: TrainingPrecision | None = None,
        scales_loss: bool | None = None,
        local: LocalSteps | None = None,
    ) -> None:
        self._training, self._sum_over_all, self.reducer = training, sum_over_all, reducer
        self._working_weights, self._on_host = dict(parameters), on_host
        shapes = {name: parameter.shape for name, parameter in self._working_weights.items()}
        self._ownership = ownership or Ownership.single_rank(shapes)
        dtype = WORKING_DTYPES[precision or training.precision]
        keeps_fp32 = dtype == torch.float32
        self._loss_scale = LossScale() if (dtype == torch.float16 if scales_loss is None else scales_loss) else None
        self._gradients = GradientAccumulator(self._working_weights, self._ownership, dtype)
        self._shards: list[WeightShard] = []
        for name, parameter in self._working_weights.items():
            self._shards += make_weight_shards(
                name, parameter, self._ownership, keeps_fp32=keeps_fp32, on_host=on_host, apart=gathers
            )
            if not keeps_fp32:
                self._gradients.lower(name)
        self._exchange, self._sums = exchange, None
        self._counts: AccumulationCounts | None = None
        if exchange is not None and reducer is not None:
            self._sums = GradientShards(self._gradients, self._ownership, exchange, reducer, late)
            self._gradients.observe(self._sums.on_accumulated)
        elif overlap_reduction and reducer is not None:
            self._counts = AccumulationCounts()
            self._gradients.observe(self._on_accumulated)
        self.adam = _make_adamw(self._shards, training)
        self._outer = None if local is None else OuterOptimizer(self._shards, training, local)
        self._state = OptimizerState(
            self._working_weights, self._shards, self._ownership, self.adam, self._outer, gathers=gathers
        )
        self.gatherer: WeightGatherer | None = None
        """What gathers the weights of the model for their use, if they are sharded."""
        if gathers and exchange is not None:
            self.gatherer = WeightGatherer(self._working_weights, self._shards, self._ownership, exchange)
        self.by_layer: LayerGathering | None = None
        """What gathers them layer by layer; None: all are gathered once a step."""

    @property
    def gradient_scale(self) -> float:
        """By which the loss of the next step is multiplied before its gradients are computed."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return the accumulated fp32 gradient of a parameter, of its local shape; None if it has none."""
        return self._gradients.get(name)

    def close(self) -> None:
        """Free what the sums of gradients hold; no update follows."""
        if self.reducer is not None:
            self.reducer.close()
        if self._outer is not None:
            self._outer.local.reducer.close()

    def begin_passes(self) -> None:
        """Gather sharded weights for the passes of a step or an evaluation, at the same place on all ranks.

        Weights that are gathered layer by layer follow in the passes.
        """
        if self.gatherer is not None and self.by_layer is None:
            self.gatherer.gather_all()

    def gather_weights(self) -> None:
        """Gather all weights of the model, if they are sharded, for an export; all ranks call this."""
        if self.gatherer is not None:
            self.gatherer.gather_all()

    def weights_in_turn(self) -> Iterator[Collection[str] | None]:
        """Yield names of weights that are whole until the next are asked for (None: all of this rank).

        Sharded weights of a whole model are gathered layer by layer. All ranks iterate to the end together.
        """
        if self.gatherer is None:
            yield None
            return
        for names in (None,) if self.by_layer is None else self.by_layer.places:
            if names is None:
                self.gatherer.gather_all()
            else:
                self.gatherer.gather(names)
            yield names
            self.gatherer.release_all()

    def end_evaluation(self, num_missing: int) -> None:
        """End the passes of an evaluation, of which this rank had `num_missing` fewer than another."""
        if self.by_layer is not None:
            self.by_layer.repeat_forward(num_missing)
        if self.gatherer is not None:
            self.gatherer.release_all()

    def begin_step(self) -> None:
        """Begin a step, at the same place on all ranks; needed for what begins before the update."""
        self.begin_passes()
        if self._counts is not None and self.reducer is not None:
            self.reducer.begin(self._gradients.segment_view, to_all_owners=not self._ownership.shard_updates)

    def final_backward(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Return the context of a pass that completes the gradients of `names`, of a chunk, for a micro-batch."""
        return nullcontext() if self._sums is None else self._sums.final_backward(names)

    def _on_accumulated(self, name: str) -> None:
        if self._counts is not None and self._counts.add(name) and self.reducer is not None:
            self.reducer.start_final(self._counts.is_final)

    def apply(self, step: int, loss: Callable[[], float] = lambda: 0.0) -> UpdateResult:
        """Update the weights with the gradients accumulated since the last call; `step` counts from 0.

        `loss` reads this rank's part of the loss; it is called where the host waits for the gradient norm in any case.
        """
        # Step 1: reduce the gradients over all owners.
        if self._sums is not None:
            self._sums.finish_step()
            if self.gatherer is not None:
                self.gatherer.release_all()
        elif self.reducer is not None:
            self._gradients.zero_missing_shared()
            self.reducer.reduce(self._gradients.segment_view, to_all_owners=not self._ownership.shard_updates)
        if self._counts is not None:
            self._counts.end_step()
        # Step 2: sum gradient norm and loss over all ranks.
        squares_here = (self._sums or self._gradients).sum_of_squares()
        loss_here = loss()
        squares, total_loss, is_finite = self._sum_over_ranks(squares_here.item(), loss_here)
        scale = self.gradient_scale
        norm, rate = math.sqrt(squares) / scale, learning_rate(self._training, step)
        # Step 3: clip, update the master weights, average them if that is due, refresh the working weights.
        if is_finite:
            self._clip_gradients(norm, scale)
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
        is_average = self._outer is not None and self._outer.is_due(step)
        if self._outer is not None and is_average:
            self._outer.step(partial(self._state.segment_view, "weight"))
        if is_finite or is_average:
            self._refresh_working_weights()
        self.clear_gradients()
        if self._loss_scale is not None:
            self._loss_scale.add_step(is_finite=is_finite)
            if self.reducer is not None and self.gradient_scale != scale:
                self.reducer.rescale_errors(self.gradient_scale / scale)
        return UpdateResult(norm, rate, skipped=not is_finite, loss=total_loss, loss_scale=scale)

    def _sum_over_ranks(self, squares: float, loss: float) -> tuple[float, float, bool]:
        """Return the squared gradient norm of this rank's group, the loss, and whether those of all groups are finite.

        `squares` and `loss` are this rank's parts of its group's.
        """
        group, shares = (0, (1.0,)) if self._outer is None else (self._outer.local.group, self._outer.local.shares)
        mine = torch.zeros(len(shares) + 1, dtype=torch.float64)
        mine[group], mine[-1] = squares, loss * shares[group]
        *by_group, total_loss = self._sum_over_all(mine).tolist()
        return by_group[group], total_loss, all(map(math.isfinite, by_group))

    def checkpoint_state(self) -> NamedTensors:
        """Return the tensors that a checkpoint stores of this rank (`OptimizerState.checkpoint_state`)."""
        shares = () if self._outer is None else self._outer.local.shares
        groups = {GROUP_SHARES: torch.tensor(shares, dtype=torch.float64)} if shares else {}
        return self._state.checkpoint_state() | self._scale_state() | groups

    def load_checkpoint_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the checkpoint state of all parameters of the stage (`OptimizerState.load_checkpoint_state`).

        Raises `UnavailableError` if a tensor has another shape.
        """
        self._state.load_checkpoint_state(tensors)
        if self.gatherer is not None:
            self.gatherer.refresh(self._shards)
        self._load_scale_state(tensors)

    def local_state(self) -> NamedTensors:
        """Return this rank's part of the state, for a snapshot: ranks of a cluster that hold the same share it."""
        return self._state.local_state() | self._scale_state()

    def load_local_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore a result of `local_state`, of this or an earlier process; shapes must be equal.

        All ranks call this, or `share_state`, at the same time.
        """
        self._state.load_local_state(tensors)
        self._load_scale_state(tensors)
        self.share_state()

    def extra_state(self) -> NamedTensors:
        """Return tensors that a checkpoint may hold beside those of the parameters, for it to fill."""
        return self._scale_state()

    def _scale_state(self) -> NamedTensors:
        return {} if self._loss_scale is None else {LOSS_SCALE: self._loss_scale.state()}

    def _load_scale_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the loss scale, if the run scales its loss; after a state of a run that did not, it starts afresh.

        So it is the same on ranks that have trained on since that state and on a replacement.
        """
        if self._loss_scale is not None:
            self._loss_scale = LossScale()
            if LOSS_SCALE in tensors:
                self._loss_scale.load_state(tensors[LOSS_SCALE])

    def share_state(self) -> None:
        """Give weights and moments that this rank leads to the owners in its cluster, and take theirs."""
        if self.reducer is not None and not self._ownership.shard_updates:
            for kind in self._state.kinds:
                self.reducer.broadcast_in_cluster(partial(self._state.segment_view, kind))
        self._refresh_working_weights()

    def clear_gradients(self) -> None:
        """Discard the accumulated gradients, and what has begun of their sums."""
        self._gradients.clear()
        if self._sums is not None:
            self._sums.clear()
        if self.gatherer is not None:
            self.gatherer.release_all()
        if self._counts is not None and self.reducer is not None:
            self._counts.discard_step()
            self.reducer.discard()
        for one in self._shards:
            one.weight.grad = None

    def _refresh_working_weights(self) -> None:
        """Copy the new master weights to the working weights, including those that other ranks updated."""
        if self.gatherer is not None:
            self.gatherer.refresh(self._shards)
            return
        for one in self._shards:
            if one.is_view_of(self._working_weights[one.name]):
                continue
            working = one.view_in(self._working_weights[one.name].detach())
            new = one.weight.detach()
            if working.is_cuda and not new.is_cuda:  # convert before the transfer
                new = empty_host_tensor(working).copy_(new)
            working.copy_(new)
        if self._exchange is not None:
            share_values(self._exchange, self._working_view)
        elif self.reducer is not None and self._ownership.shard_updates:
            self.reducer.broadcast_in_cluster(self._working_view)

    def _working_view(self, segment: ParameterSegment) -> torch.Tensor:
        return view_rows(self._working_weights[segment.name].detach(), self._ownership.locate(segment))

    def _clip_gradients(self, norm: float, scale: float) -> None:
        """Assign each master weight its gradient over `scale`, clipped to a norm of `clip_norm` (0: no limit)."""
        weights, parts = [], []
        for one in self._shards:
            gradient = self._shard_gradient(one)
            if gradient is not None:
                weights.append(one.weight)
                parts.append(gradient)
        parts = copy_tensors_to_host(parts) if self._on_host else [part.contiguous() for part in parts]
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part
        limit = self._training.clip_norm
        gradients = [one.weight.grad for one in self._shards if one.weight.grad is not None]
        factor = (limit / norm if 0 < limit < norm else 1.0) / scale
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _shard_gradient(self, one: WeightShard) -> torch.Tensor | None:
        """Return the gradient of a shard; None if it has none, or has it already as the weight of the model."""
        if self._sums is not None:
            return self._sums.rows(one.name, one.rows)
        gradient = self.gradient(one.name)
        is_model_weight = one.weight is self._working_weights[one.name]
        return None if gradient is None or is_model_weight else one.view_in(gradient)


def _make_adamw(shards: Iterable[WeightShard], training: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW for the weights of `shards`; weight decay applies to matrices only."""
    weights = [one.weight for one in shards]
    decay = training.weight_decay
    groups: list[dict[str, object]] = [
        {"params": [one for one in weights if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in weights if one.dim() <= 1], "weight_decay": 0.0},
    ]
    empty: dict[str, object] = {"params": [nn.Parameter(torch.zeros(0))]}  # for a rank without updates
    return torch.optim.AdamW(
        [group for group in groups if group["params"]] or [empty],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        fused=True,
    )
