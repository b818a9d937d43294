"""`StageModel`: the transformer layers of one pipeline stage, and the loss after the last stage.

A stage is split from the full model on the meta device before memory is allocated, so a worker allocates only
its own layers and its tensor-parallel slices of them. Chained stages compute the same as the full
transformers model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from isthmus.core.base_model import AttentionKernelName
from isthmus.core.errors import PlanError
from isthmus.train.context_parallel.attention_interface import use_context_attention
from isthmus.train.context_parallel.context_parallel_group import ContextParallelGroup
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup
from isthmus.train.expert_parallel.replayed_routing import replayed_routing
from isthmus.train.expert_parallel.shared_expert import overlap_shared_expert
from isthmus.train.expert_parallel.token_exchange import exchange_tokens
from isthmus.train.kernels.compile_layers import compile_layers
from isthmus.train.kernels.linear_products import LinearProducts
from isthmus.train.model.balance_loss import (
    balance_coefficient,
    capture_balance_losses,
    find_router,
    find_routers,
)
from isthmus.train.model.chunked_loss import LOSS_CHUNK_BYTES, chunked_loss, tokens_per_chunk
from isthmus.train.model.initialise import initialise_parameter
from isthmus.train.model.layer_products import use_products
from isthmus.train.model.layer_weights import LayerWeights
from isthmus.train.model.load_weights import load_weights
from isthmus.train.model.position_cache import PositionCache, PositionInputs
from isthmus.train.model.recompute import NO_RECOMPUTE, RecomputePolicy, run_layer
from isthmus.train.model.transformers_model import (
    build_meta_model,
    choose_expert_kernels,
    rotary_embedding,
    sliding_window_layers,
)
from isthmus.train.tensor_parallel.parameter_slices import ExpertShare
from isthmus.train.tensor_parallel.shard_layers import (
    VocabParallelEmbedding,
    register_collectives,
    shard_parameters,
    shared_expert_regions,
)
from isthmus.train.tensor_parallel.tensor_parallel_group import (
    TensorParallelGroup,
    enter_parallel_region,
    gather_sequence,
    split_sequence,
)
from isthmus.train.tensor_parallel.vocab_parallel_loss import vocab_parallel_loss

IGNORED_LABEL = -100
"""Label of positions that the loss ignores."""

EMBEDDING_WEIGHT = "model.embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"


class StageModel(nn.Module):
    """Decoder layers `[first, last)` of a model; the first stage adds the embedding, the last norm and head.

    Use `build_stage` to create one. Submodules keep the names and layer numbers of the full model. `tied`:
    head and embedding are one parameter; then the first and the last stage hold a copy each, whose gradients
    the runtime sums, and a stage that is both holds one parameter.

    `group` are the tensor-parallel ranks of the stage and `slices` this rank's slices by full-model parameter
    name; `context`, if any, are the ranks that share its sequences, and S below is the number of this rank's tokens;
    `experts`, if any, are those that share its experts.
    Hidden states are complete on each tensor-parallel rank; logits cover the rank's part of the vocabulary.
    """

    def __init__(
        self,
        full: PreTrainedModel,
        layers: tuple[int, int],
        device: torch.device | str,
        group: TensorParallelGroup,
        attention: AttentionKernelName = "sdpa",
        context: ContextParallelGroup | None = None,
        experts: ExpertParallelGroup | None = None,
    ) -> None:
        super().__init__()
        self._attention_backends = [SDPBackend.FLASH_ATTENTION] if attention == "flash" else []
        self.context, self.experts = context, experts
        self.config = full.config
        self.device = torch.device(device)
        self.architecture = type(full).__name__
        self.layers = layers
        self.is_first = layers[0] == 0
        self.is_last = layers[1] == full.config.num_hidden_layers
        self.hidden_size: int = full.config.hidden_size
        self.vocab_size: int = full.config.vocab_size
        self.tied = bool(full.config.tie_word_embeddings)
        self.model = nn.Module()
        if self.is_first:
            self.model.embed_tokens = full.model.embed_tokens
        self.model.layers = nn.ModuleDict({str(i): full.model.layers[i] for i in range(*layers)})
        if self.is_last:
            self.model.norm = full.model.norm
            self.lm_head = full.lm_head
            if self.tied and self.is_first:
                self.lm_head.weight = self.model.embed_tokens.weight
        self.layer_weights = LayerWeights()
        self.group = group
        share = None if experts is None else ExpertShare(experts.expert_rank, experts.size)
        self.slices = {
            EMBEDDING_WEIGHT if self.tied and name == HEAD_WEIGHT else name: held
            for name, held in shard_parameters(self, group, share).items()
        }
        if self.is_first and group.size > 1:
            first, embedding = self._first_token_id(EMBEDDING_WEIGHT), self.model.embed_tokens
            self.model.embed_tokens = VocabParallelEmbedding(embedding.weight, first, embedding.padding_idx, group)
        self.loss_chunk_bytes = LOSS_CHUNK_BYTES
        self.balance_coefficient = balance_coefficient(full.config)
        self.routing, self._routed_layers = find_routers(full.model.layers)
        self.routes_own_tokens = False
        self._sliding_layers = sliding_window_layers(full.config)
        windows = frozenset(i in self._sliding_layers for i in range(*layers))
        self.position_cache = PositionCache(
            full.config, rotary_embedding(full, device), windows,
            None if context is None else context.share.positions,
        )  # fmt: skip
        if context is not None:
            for layer in self.model.layers.values():
                use_context_attention(full.config, layer.self_attn, context)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that the stage computes with."""
        return next(self.parameters()).dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage on `x`: token ids `[B, S]` (int64) on the first stage, else `[B, S, H]`.

        Returns hidden states `[B, S, H]`, or on the last stage logits `[B, S, V / tp]`.
        """
        out = self.compute(x)[0]
        logits: torch.Tensor = self.lm_head(out) if self.is_last else out
        return logits

    def compute(
        self, x: torch.Tensor, recompute: RecomputePolicy = NO_RECOMPUTE, routing: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden states [B, S, H], on the last stage the input of the head, and a part of the balance loss.

        That part, of this stage's layers, is an fp32 scalar, not yet multiplied by `balance_coefficient`; None if
        the coefficient is 0, no layer of the stage has experts, or gradients are disabled. `recompute` is the
        activation recomputation policy. Tokens take the experts of `routing` [B, S, routers of the model, k]; those
        with -1, and all without it, take what the router chooses.
        """
        self.layer_weights.enter(0)
        hidden = self.model.embed_tokens(x) if self.is_first else split_sequence(x.to(self.dtype), self.group)
        self.layer_weights.leave(0, hidden)
        positions = self.position_cache.get(hidden.new_empty((*x.shape[:2], 0)))
        training, balances = torch.is_grad_enabled(), []
        for number, (index, layer) in enumerate(self.model.layers.items()):
            taken = self._experts_of(routing, int(index))
            run = partial(self.run_decoder_layer, layer, positions, int(index) in self._sliding_layers, taken=taken)
            self.layer_weights.enter(number + 1)
            hidden, balance = run_layer(recompute.kind_of(number) if training else "none", layer, run, hidden)
            self.layer_weights.leave(number + 1, hidden)
            if balance is not None:
                balances.append(balance)
        total = torch.stack(balances).sum() / self.routing.num_layers if balances else None
        if not self.is_last:
            return gather_sequence(hidden, self.group), total
        self.layer_weights.enter(len(self.model.layers) + 1)
        return enter_parallel_region(self.model.norm(hidden), self.group), total

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum (fp32, in nats) of the cross entropies of `labels` [B, S] that count.

        `hidden` [B, S, H] is the input of the head. If the fp32 logits of all tokens exceed `loss_chunk_bytes`, head
        and loss are computed by chunks, which takes one product of the head more.
        """
        loss = self._head_loss(hidden, labels)
        self.layer_weights.leave(len(self.model.layers) + 1, loss)
        return loss

    def token_losses(self, hidden: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Return the cross entropies (fp32, in nats) [B, S] of `labels` [B, S], 0 where one does not count.

        `hidden` [B, S, H] is the input of the head; logits are divided by `temperature`. With the sign changed these
        are the log-probabilities of tokens that were drawn at that temperature.
        """
        if temperature != 1.0:
            hidden = hidden / temperature
        flat = self._split_losses(hidden, labels)
        if flat is None:
            logits = self.lm_head(hidden).reshape(-1, self.vocab_size).float()
            flat = nn.functional.cross_entropy(
                logits, labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="none"
            )  # fmt: skip
        losses = flat.reshape(labels.shape)
        self.layer_weights.leave(len(self.model.layers) + 1, losses)
        return losses

    def _head_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        split = self._split_losses(hidden, labels)
        return token_loss(self.lm_head(hidden), labels) if split is None else split.sum()

    def _split_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Return the losses [B S] by chunks of tokens or parts of the vocabulary; None if neither is needed."""
        chunk_tokens = tokens_per_chunk(self.vocab_size, self.group.size, self.loss_chunk_bytes)
        first = 0 if self.group.size == 1 else self._first_token_id(EMBEDDING_WEIGHT if self.tied else HEAD_WEIGHT)
        if labels.numel() > chunk_tokens:
            return chunked_loss(
                hidden,
                self.lm_head.weight,
                labels,
                chunk_tokens=chunk_tokens,
                ignored_label=IGNORED_LABEL,
                first_token=first,
                group=self.group,
            )
        if self.group.size == 1:
            return None
        return vocab_parallel_loss(self.lm_head(hidden), labels, first, self.group, IGNORED_LABEL)

    def names_by_place(self) -> tuple[frozenset[str], ...]:
        """Return the full-model names of the parameters of each place of `LayerWeights`."""
        first, last = self.layers
        places: list[set[str]] = [set() for _ in range(last - first + 2)]
        for name, _ in self.global_named_parameters():
            parts = name.split(".")
            inside = parts[:2] == ["model", "layers"]
            places[int(parts[2]) - first + 1 if inside else 0 if name == EMBEDDING_WEIGHT else -1].add(name)
        if self.is_last and self.tied:
            places[-1].add(EMBEDDING_WEIGHT)
        return tuple(map(frozenset, places))

    def _first_token_id(self, name: str) -> int:
        return self.slices[name].ranges[0][0]

    def _experts_of(self, routing: torch.Tensor | None, layer: int) -> torch.Tensor | None:
        """Return the experts [T, k] that the tokens of layer `layer` take here; None where its router chooses."""
        if routing is None or layer not in self._routed_layers:
            return None
        taken = routing[:, :, self._routed_layers.index(layer)].to(self.device)
        return (self.group.own_tokens(taken) if self.routes_own_tokens else taken).flatten(0, 1)

    def run_decoder_layer(
        self, layer: nn.Module, positions: PositionInputs, sliding: bool, hidden: torch.Tensor,
        taken: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Return the output [B, S, H] of `layer` for `hidden` [B, S, H], and its balance loss, a scalar, if any.

        `taken` [T, k] are the experts that its tokens take; None, and -1 for a token: those that its router chooses.
        """
        with ExitStack() as contexts:
            if self._attention_backends:
                contexts.enter_context(sdpa_kernel(self._attention_backends))
            if taken is not None and (router := find_router(layer)) is not None:
                contexts.enter_context(replayed_routing(router, taken))
            return self._run_layer(layer, positions, sliding, hidden)

    def _run_layer(
        self, layer: nn.Module, positions: PositionInputs, sliding: bool, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        run = partial(
            layer,
            hidden,
            attention_mask=positions.masks[sliding],
            position_ids=positions.positions,
            position_embeddings=positions.rotation,
            use_cache=False,
        )
        router = find_router(layer)
        if router is None or self.balance_coefficient == 0 or not torch.is_grad_enabled():
            return run(), None
        sum_shares = None if self.context is None else self.context.all_reduce_sum
        with capture_balance_losses(router, sum_shares) as balances:
            return run(), balances[0]

    def global_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter of the stage once with its full-model name.

        The last stage yields a tied head as `model.embed_tokens.weight`.
        """
        for name, parameter in self.named_parameters():
            yield (EMBEDDING_WEIGHT if self.tied and name == HEAD_WEIGHT else name), parameter


def build_stage(
    model: str | Path,
    layers: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    weights: Literal["random", "load"],
    group: TensorParallelGroup | None = None,
    attention: AttentionKernelName = "sdpa",
    compiled: bool = False,
    context: ContextParallelGroup | None = None,
    experts: ExpertParallelGroup | None = None,
    products: LinearProducts | None = None,
) -> StageModel:
    """Build layers `layers` (first, last exclusive) of `model`, a Hugging Face folder or `config.json`.

    Parameters have `dtype` and are on `device`. With `weights` "random" they depend on (`seed`, full name)
    only, for any pipeline split; with "load" they come from the safetensors files of the folder, of which
    only this stage's tensors are read. `group` are the tensor-parallel ranks, `context` those that share a sequence,
    `experts` those that share experts; `attention` and `compiled` as in `TrainingConfig`; `products` are those of
    decoder layers (default: in the precision of the weights). Peak memory is the stage plus one full tensor (or 64
    MiB).
    Raises `ModelError` for an unusable model or weight and `PlanError` for a layer range outside the model.
    """
    # Step 1: split the stage from the full model on the meta device.
    full = build_meta_model(model, attention)
    _check_range(layers, full.config.num_hidden_layers, model)
    group = group or TensorParallelGroup()
    num_slices = group.size if experts is None else 1
    choose_expert_kernels(full.config, device, num_slices, one_by_one=products is not None)
    stage = StageModel(full, layers, device, group, attention, context, experts)
    del full
    # Step 2: allocate its parameters and add the collectives.
    _materialise(stage, dtype, device)
    # A balance loss needs all tokens of a stage at its routers.
    stage.routes_own_tokens = routes_own = (
        experts is not None and group.sequence_parallel and not stage.balance_coefficient
    )
    if stage.group.size > 1:
        for layer in stage.model.layers.values():
            register_collectives(layer, stage.group, routes_own_tokens=routes_own)
        if stage.is_last and stage.group.sequence_parallel:
            stage.model.norm.weight.register_hook(stage.group.all_reduce_sum)
    if experts is not None:
        tp_rank, tp_size = (0, 1) if routes_own else (group.tp_rank, group.size)
        for layer in stage.model.layers.values():
            if find_router(layer) is not None:
                exchange = exchange_tokens(layer.mlp.experts, experts, tp_rank=tp_rank, tp_size=tp_size)
                if hasattr(layer.mlp, "shared_expert") and experts.size > 1:
                    overlap_shared_expert(layer.mlp, exchange, *shared_expert_regions(group, routes_own))
    if products is not None:
        use_products(stage.model.layers, products)
    if compiled:
        compile_layers(stage.model.layers.values())
    # Step 3: fill the parameters.
    if weights == "load":
        load_weights(_full_parameters(stage), model)
        return stage
    std, padding = stage.config.initializer_range or 0.02, stage.config.pad_token_id
    for name, parameter in _full_parameters(stage):
        zero_row = padding if name == EMBEDDING_WEIGHT else None
        initialise_parameter(name, parameter, seed=seed, std=std, zero_row=zero_row)
    return stage


def _full_parameters(stage: StageModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each full parameter for the caller to fill; then copy this rank's slice of it."""
    for name, parameter in stage.global_named_parameters():
        held = stage.slices[name]
        if held.is_full:
            yield name, parameter
            continue
        whole = torch.empty(held.shape, dtype=parameter.dtype)
        yield name, whole
        parameter.detach().copy_(held.take_from(whole))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum (fp32, in nats) of the cross entropies of all labels except -100.

    `logits` is `[B, S, V]`; `labels[b, t]` of `labels` `[B, S]` is the token after position t.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return nn.functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum")


def _check_range(layers: tuple[int, int], num_layers: int, model: str | Path) -> None:
    first, last = layers
    if last <= first:
        raise PlanError(
            f"stage of layers [{first}, {last}) has no layer of {model}",
            hint=f"the model has {num_layers} layers: plan at most {num_layers} stages",
        )
    if first < 0 or last > num_layers:
        raise PlanError(
            f"layers [{first}, {last}) are not in {model}, which has layers 0 to {num_layers - 1}",
            hint="plan again with this model",
        )


def _materialise(stage: StageModel, dtype: torch.dtype, device: torch.device | str) -> None:
    """Allocate each meta parameter, uninitialised; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
            setattr(module, name, made[id(parameter)])
