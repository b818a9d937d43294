"""`PolicyGatherer`: the weights of the whole model at rank 0, from the stages that hold them."""

from __future__ import annotations

import json

import torch

from isthmus.core.plan import Plan
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.model.gather_full_parameters import gather_full_parameters, give_experts
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.update.optimizer import Optimizer

FIRST_TAG = 1 << 19
"""Tag of the first tensor; tags of schedules and reductions are below."""


class PolicyGatherer:
    """Gathers the model of replica 0; all ranks of the plan call `gather` together.

    Of a stage the rank that holds shard 0 of the weights and share 0 of the tokens sends what the stage has. A tied
    embedding comes from the stage that is first in the order of ranks.
    """

    def __init__(self, plan: Plan, rank: int, chunks: ModelChunks, communicator: Communicator) -> None:
        self._rank, self._communicator = rank, communicator
        self._chunks = ModelChunks(chunks.first_copy)
        stage, place = plan.stage_of(rank), plan.ranks[rank]
        self._takes_part = stage.replica == 0 and place.cp == 0
        self._sends = self._takes_part and place.tp == 0
        experts = chunks.experts
        self._gives_experts = experts is not None and any(
            plan.stage_of(one).replica == 0 and plan.ranks[one].cp == 0 for one in experts.ranks
        )
        held = [
            (name, list(chunks.slices[name].shape), str(one.dtype).removeprefix("torch."))
            for name, one in self._chunks.global_named_parameters()
        ]
        gathered = communicator.all_gather_bytes(json.dumps(held if self._sends else []).encode())
        # The rank that sends each parameter, its shape and its dtype.
        self._parts: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for of_rank, parts in enumerate(gathered):
            for name, shape, dtype in json.loads(parts):
                self._parts.setdefault(str(name), (of_rank, torch.Size(shape), getattr(torch, dtype)))

    def gather(self, optimizer: Optimizer) -> dict[str, torch.Tensor] | None:
        """Return copies of all parameters, of any shape, by full-model name on the CPU at rank 0, None elsewhere.

        Weights that `optimizer` shards over replicas are gathered from these first.
        """
        own: dict[str, torch.Tensor] = {}
        for names in optimizer.weights_in_turn():
            if self._takes_part:
                for name, tensor in gather_full_parameters(self._chunks, names):
                    if self._sends and self._parts[name][0] == self._rank:
                        own[name] = tensor.detach().to("cpu", copy=True).contiguous()
            elif self._gives_experts:
                give_experts(self._chunks, names)
        if self._rank:
            messages = [(0, number, own[name]) for number, name in enumerate(self._parts) if name in own]
            self._exchange(messages, send=True)
            return None
        others = {
            name: (rank, number, torch.empty(shape, dtype=dtype))
            for number, (name, (rank, shape, dtype)) in enumerate(self._parts.items())
            if rank
        }
        self._exchange(list(others.values()), send=False)
        return own | {name: tensor for name, (_, _, tensor) in others.items()}

    def _exchange(self, messages: list[tuple[int, int, torch.Tensor]], *, send: bool) -> None:
        works = self._communicator.start(
            [TensorMessage(tensor, peer, FIRST_TAG + number, send) for peer, number, tensor in messages]
        )
        for work in works:
            self._communicator.wait(work, until_delivered=send)
