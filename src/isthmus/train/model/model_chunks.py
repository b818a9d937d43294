"""`ModelChunks`: the model chunks of one rank, one per virtual stage of its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from isthmus.core.model_parts.routing_shape import RoutingShape
from isthmus.train.context_parallel.context_parallel_group import ContextParallelGroup
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup
from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.model.stage_model import EMBEDDING_WEIGHT, StageModel
from isthmus.train.tensor_parallel.parameter_slices import ParameterSlice
from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup


class ModelChunks:
    """The chunks of one rank; most schedules have one chunk per rank.

    With `num_copies` 2 (bidirectional schedule) the second half of the chunks belongs to a second model copy.
    An embedding and a tied head on the same rank are one parameter.
    """

    def __init__(self, chunks: Sequence[StageModel], num_copies: int = 1) -> None:
        self.chunks = tuple(chunks)
        self.first_copy = self.chunks[: len(self.chunks) // num_copies]
        for head in self.chunks:
            if self.tied and head.is_last and not head.is_first and self.is_first:
                head.lm_head.weight = next(one for one in chunks if one.is_first).model.embed_tokens.weight

    @property
    def first_chunk(self) -> StageModel:
        """Chunk 0."""
        return self.chunks[0]

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the embedding."""
        return any(model.is_first for model in self.chunks)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the final norm and the head."""
        return any(model.is_last for model in self.chunks)

    @property
    def reports_loss(self) -> bool:
        """Whether this rank reports the loss: it holds the head of the first model copy."""
        return any(model.is_last for model in self.first_copy)

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one parameter."""
        return bool(self.chunks[0].tied)

    @property
    def architecture(self) -> str:
        """Class name of the model."""
        return str(self.first_chunk.architecture)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.first_chunk.device

    @property
    def group(self) -> TensorParallelGroup:
        """The tensor-parallel group of the stage."""
        return self.first_chunk.group

    @property
    def context(self) -> ContextParallelGroup | None:
        """The ranks that share the sequences of the stage, if any."""
        return self.first_chunk.context

    @property
    def experts(self) -> ExpertParallelGroup | None:
        """The ranks that share the experts of the stage, if any."""
        return self.first_chunk.experts

    @property
    def slices(self) -> dict[str, ParameterSlice]:
        """This rank's slice of each parameter, by full-model name."""
        return {name: held for model in self.chunks for name, held in model.slices.items()}

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        return self.first_chunk.vocab_size

    @property
    def routing(self) -> RoutingShape:
        """The routers of the whole model, and the experts that each chooses; no layers for a dense model."""
        return self.first_chunk.routing

    @property
    def late_names(self) -> frozenset[str]:
        """Parameters whose gradient other stages add to: a tied embedding, unless this rank has both of its ends."""
        return frozenset({EMBEDDING_WEIGHT} if self.tied and self.is_first != self.is_last else ())

    def names_of(self, chunk: int) -> frozenset[str]:
        """Return the full-model names of the parameters of a chunk."""
        return frozenset(name for name, _ in self.chunks[chunk].global_named_parameters())

    def recompute_policies(self, policy: RecomputePolicy) -> tuple[RecomputePolicy, ...]:
        """Return the policy of each chunk; `policy` covers this rank's layers of each model copy."""
        if policy.num_layers is None:
            return (policy,) * len(self.chunks)
        counts: list[int] = []
        for number, model in enumerate(self.chunks):
            before = sum(counts[number - number % len(self.first_copy) :])  # layers of earlier chunks of this copy
            counts.append(min(policy.num_layers - before, model.layers[1] - model.layers[0]))
        return tuple(RecomputePolicy(policy.kind, count) for count in counts)

    def global_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once with its full-model name."""
        seen: set[int] = set()
        for model in self.chunks:
            for name, parameter in model.global_named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter
