"""`PolicyMicroBatches`: the micro-batches of a step whose loss is the policy loss on sampled tokens.

Shapes: N samples of the step, B samples of a micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.rl.aggregate_weights import aggregate_weights
from isthmus.rl.correction import correction
from isthmus.rl.k3_penalty import k3_penalty
from isthmus.rl.policy_loss import policy_token_losses
from isthmus.rl.rollout.trajectory import PolicyBatch
from isthmus.train.model.stage_model import IGNORED_LABEL, StageModel
from isthmus.train.pipeline.micro_batches import MicroBatches

STATISTICS = ("num_tokens", "clipped", "minus_logp", "kl_rollout", "ratio", "ratio_squared", "kl_reference")
"""Sums over tokens that `PolicyMicroBatches.sums` has, in this order."""


@dataclass(frozen=True)
class PolicyMicroBatches(MicroBatches):
    """One replica's samples of one step; label t of a sequence is its token t + 1, where a response has it."""

    rl: RlConfig | None = None
    # [B, S] float32 by micro-batch: log-probabilities of the labels when sampled, advantages, and shares of the loss.
    rollout_logp: tuple[torch.Tensor, ...] = ()
    advantages: tuple[torch.Tensor, ...] = ()
    weights: tuple[torch.Tensor, ...] = ()
    # [B, S] float32 by micro-batch, empty where the job needs none: log-probabilities of the labels by the weights at
    # the start of the step, and by those that training began with.
    old_logp: tuple[torch.Tensor, ...] = ()
    reference_logp: tuple[torch.Tensor, ...] = ()
    # [len(STATISTICS)] float64 by micro-batch whose loss was computed, on the device.
    sums: list[torch.Tensor] = field(default_factory=list)

    def loss(self, model: StageModel, hidden: torch.Tensor, labels: torch.Tensor, number: int, /) -> torch.Tensor:
        """Return the part of micro-batch `number` [B, S] in the policy loss of the step, a scalar."""
        if self.rl is None:
            raise RuntimeError("a policy loss needs the job's rl")
        logp, mask = -model.token_losses(hidden, labels, self.rl.temperature), labels != IGNORED_LABEL
        if not bool(mask.any()):
            return logp.sum() * 0.0
        device = logp.device
        sampled, advantages, weights = (
            one[number].to(device) for one in (self.rollout_logp, self.advantages, self.weights)
        )  # fmt: skip
        old = self.old_logp[number].to(device) if self.old_logp else sampled
        reference = self.reference_logp[number].to(device) if self.reference_logp else None
        factors = None
        if self.rl.correction is not None:
            given, own = self.rl.correction, old if self.old_logp else logp.detach()
            factors = correction(own, sampled, mask, level=given.level, truncate=given.truncate)
        losses = policy_token_losses(
            logp, old, advantages, mask, clip=self.rl.clip, clip_dual=self.rl.clip_dual, weights=factors,
            ref_logp=reference, kl=self.rl.kl,
        )  # fmt: skip
        self.sums.append(_statistics(logp.detach(), old, sampled, advantages, mask, self.rl, reference))
        return (losses * weights).sum()


def make_policy_batches(
    batch: PolicyBatch,
    rl: RlConfig,
    sequence_length: int,
    micro_batch_size: int,
    rows: tuple[int, int],
    positions: Sequence[int] | None,
    *,
    is_first: bool,
    is_last: bool,
) -> PolicyMicroBatches:
    """Return the micro-batches of samples `rows` (first, end) of a step, for a stage that is first or last or neither.

    Sequences are padded to `sequence_length` (S). The shares of the loss count the tokens of all samples of the step.
    """
    count = len(batch.tokens)
    tokens = torch.zeros((count, sequence_length + 1), dtype=torch.int64)
    tokens[:, : batch.tokens.shape[1]] = batch.tokens
    mask = torch.zeros((count, sequence_length + 1), dtype=torch.bool)
    mask[:, : batch.sampled.shape[1]] = batch.sampled
    mask = mask[:, 1:]
    labels = torch.where(mask, tokens[:, 1:], IGNORED_LABEL)
    old = torch.zeros((count, sequence_length + 1), dtype=torch.float32)
    old[:, : batch.rollout_logp.shape[1]] = batch.rollout_logp
    weights = aggregate_weights(mask, rl.aggregate, rl.max_response_tokens).float()
    spread = batch.advantages[:, None].expand(mask.shape)

    def split(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of `values` [N, S] in micro-batches, at the positions of this rank."""
        mine = values[rows[0] : rows[1]]
        found: tuple[torch.Tensor, ...] = (mine if positions is None else mine[:, list(positions)]).split(
            micro_batch_size
        )
        return found

    plain = PolicyMicroBatches.split(
        count, micro_batch_size, sequence_length, tokens[:, :-1] if is_first else None, labels if is_last else None,
        rows=rows, positions=positions,
    )  # fmt: skip
    if batch.routing is not None:
        routing = torch.full((count, sequence_length, *batch.routing.shape[2:]), -1, dtype=batch.routing.dtype)
        length = min(sequence_length, batch.routing.shape[1])
        routing[:, :length] = batch.routing[:, :length]
        plain = replace(plain, routing=split(routing))
    if not is_last:
        return plain
    return replace(
        plain, rl=rl, rollout_logp=split(old[:, 1:]), advantages=split(spread), weights=split(weights)
    )  # fmt: skip


def _statistics(
    logp: torch.Tensor, old: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor,
    rl: RlConfig, reference: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return the sums of `STATISTICS`; all tensors are [B, S]."""
    now, advantage = logp[mask].double(), advantages[mask].double()
    change = (now - old[mask].double()).clamp(-20.0, 20.0).exp()
    clipped = ((advantage > 0) & (change > 1 + rl.clip[1])) | ((advantage < 0) & (change < 1 - rl.clip[0]))
    apart = now - sampled[mask].double()
    ratio = apart.clamp(-20.0, 20.0).exp()
    divergence = ratio - 1 - apart
    penalty = now.new_zeros(()) if reference is None else k3_penalty(now, reference[mask].double()).sum()
    return torch.stack(
        [
            mask.sum().double(), clipped.double().sum(), -now.sum(), divergence.sum(), ratio.sum(),
            ratio.square().sum(), penalty,
        ]
    )  # fmt: skip
