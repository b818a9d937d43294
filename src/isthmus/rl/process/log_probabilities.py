"""`log_probabilities`: those of a step's responses by the weights as they are, in a forward pass over the plan.

Shapes: B samples of a micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save

from isthmus.schedule import forward_only
from isthmus.train.communication.step_metrics import StepTimer
from isthmus.train.model.stage_model import StageModel
from isthmus.train.pipeline.micro_batches import MicroBatches
from isthmus.train.process.trainer import Trainer


@dataclass(frozen=True)
class _ScoredBatches(MicroBatches):
    """Micro-batches of which the last stage keeps the log-probabilities of the labels."""

    temperature: float = 1.0
    # [B, S] float32 by number of the micro-batch, on the CPU.
    found: dict[int, torch.Tensor] = field(default_factory=dict)

    def loss(self, model: StageModel, hidden: torch.Tensor, labels: torch.Tensor, number: int, /) -> torch.Tensor:
        """Keep the log-probabilities of micro-batch `number`; the pass has no loss."""
        losses = model.token_losses(hidden, labels, self.temperature)
        self.found[number] = -losses.detach().float().cpu()
        return losses.new_zeros(())


def log_probabilities(trainer: Trainer, batches: MicroBatches, temperature: float) -> tuple[torch.Tensor, ...]:
    """Return the log-probabilities [B, S] of the labels of each micro-batch, empty where this rank has no labels.

    All ranks call this together, before the step begins. Each stage computes in the precision of its training; where
    two copies of the model go in opposite directions, the first one computes for both.
    """
    plan, chunks = trainer.spec.plan, trainer.prepared.model_chunks
    scored = _ScoredBatches(
        sizes=batches.sizes, sequence_length=batches.sequence_length, num_samples=batches.num_samples,
        inputs=batches.inputs, labels=batches.labels, routing=batches.routing, temperature=temperature,
    )  # fmt: skip
    trainer.optimizer.begin_passes()
    schedule = forward_only(len(trainer.position.ranks), len(scored.sizes), len(chunks.first_copy))
    trainer.executor.run(schedule, scored, StepTimer())
    most = max(plan.micro_batches_of(replica) for replica in range(plan.dp))
    trainer.optimizer.end_evaluation(most - len(scored.sizes))
    found = scored.found
    if plan.num_model_copies > 1:
        found = _exchange(trainer, found)
    return tuple(found[number] for number in range(len(scored.sizes))) if batches.labels else ()


def _exchange(trainer: Trainer, found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what any rank of this replica has found."""
    own = save({str(number): one.contiguous() for number, one in found.items()}) if found else b""
    gathered: Sequence[bytes] = trainer.communicator.all_gather_bytes(own)
    for rank in trainer.position.ranks:
        if gathered[rank]:
            return {int(number): one for number, one in load(gathered[rank]).items()}
    raise RuntimeError("no rank of the replica has the head")
