"""`make_batch`: the samples of a step as tensors, and its bytes for the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from safetensors.torch import load, save

from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.model_parts.routing_shape import RoutingShape
from isthmus.data import PromptSet
from isthmus.rl.advantages import advantages
from isthmus.rl.ledger.rollout_events import SampleKey
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.trajectory import PolicyBatch
from isthmus.rl.routing.routing_rows import unpack_routing

BATCH_METRICS = ("reward", "response_tokens", "cut_share", "turns", "staleness", "filtered_groups")
"""What a batch says of its samples; staleness is a mean over sampled tokens, in versions."""

_TENSORS = ("tokens", "prompt_lengths", "lengths", "sampled", "rollout_logp", "advantages")


def make_batch(
    coordinator: RolloutCoordinator, prompts: PromptSet, rl: RlConfig, keys: Sequence[SampleKey], step: int,
    shape: RoutingShape | None = None,
) -> PolicyBatch:  # fmt: skip
    """Return the batch of step `step` with the samples `keys`, groups side by side, and what is to be seen of it.

    `shape` is that of routing that is replayed.
    """
    found = [coordinator.sample(key) for key in keys]
    rewards = torch.tensor([one.reward for one, _ in found], dtype=torch.float64)
    starts = [prompts.prompt(coordinator.prompt_number(key)).tokens for key in keys]
    lengths = [len(start) + len(kept.tokens) for start, (_, kept) in zip(starts, found, strict=True)]
    tokens = torch.zeros((len(keys), max(lengths)), dtype=torch.int64)
    logp, sampled = torch.zeros(tokens.shape, dtype=torch.float32), torch.zeros(tokens.shape, dtype=torch.bool)
    routing = None if shape is None else unpack_routing(shape, [kept.routing for _, kept in found], max(lengths))
    for row, (start, (sample, kept)) in enumerate(zip(starts, found, strict=True)):
        tokens[row, : lengths[row]] = torch.tensor([*start, *kept.tokens])
        logp[row, len(start) : lengths[row]] = torch.tensor(kept.log_probabilities)
        for one in sample.ranges:
            sampled[row, len(start) + one.start : len(start) + one.end] = one.is_sampled
    base = coordinator.base
    ranges = [(one, step - base - one.version) for sample, _ in found for one in sample.ranges if one.is_sampled]
    total = sum(one.end - one.start for one, _ in ranges)
    counts = [len(kept.tokens) for _, kept in found]
    return PolicyBatch(
        keys=tuple(keys),
        tokens=tokens,
        prompt_lengths=torch.tensor([len(start) for start in starts]),
        lengths=torch.tensor(lengths),
        sampled=sampled,
        rollout_logp=logp,
        advantages=advantages(rewards, rl.group).float(),
        routing=routing,
        metrics={
            "reward": float(rewards.mean()),
            "response_tokens": fmean(counts),
            "cut_share": sum(one >= rl.max_response_tokens for one in counts) / len(counts),
            "turns": fmean(sample.num_turns for sample, _ in found),
            "staleness": sum((one.end - one.start) * age for one, age in ranges) / total,
            "filtered_groups": float(coordinator.num_filtered),
        },
    )


def pack_batch(batch: PolicyBatch) -> bytes:
    """Return the tensors and metrics of a batch as bytes."""
    tensors = {"metrics": torch.tensor([batch.metrics[name] for name in BATCH_METRICS], dtype=torch.float64)}
    if batch.routing is not None:
        tensors["routing"] = batch.routing
    return bytes(save(tensors | {name: getattr(batch, name).contiguous() for name in _TENSORS}))


def unpack_batch(content: bytes) -> PolicyBatch:
    """Return the batch of `pack_batch`, without keys."""
    found = load(content)
    metrics = dict(zip(BATCH_METRICS, found.pop("metrics").tolist(), strict=True))
    return PolicyBatch(keys=(), metrics=metrics, **found)
