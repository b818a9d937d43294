"""`Trajectory` and `PolicyBatch`: tokens that engines sampled, and the samples of one training step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from isthmus.rl.ledger.rollout_events import SampleKey


@dataclass(kw_only=True)
class Trajectory:
    """The tokens of a response so far, and the log-probability of each under the version that sampled it.

    Tokens of an environment have 0. Where routing is replayed, `routing` has the experts of the first tokens of prompt
    and response, each as `RoutingShape` says.
    """

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    routing: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """The N samples of a step, groups side by side; S is the longest sequence, prompts and responses side by side.

    tokens:
        [N, S] int64, padded with 0.
    prompt_lengths, lengths:
        [N] int64: tokens of the prompt, and of prompt and response.
    sampled:
        [N, S] bool: whether an engine sampled the token; others are of prompts and environments.
    rollout_logp:
        [N, S] float32: log-probability of the token at each position; 0 where it was not sampled.
    advantages:
        [N] float32.
    routing:
        [N, S, layers with a router, experts of a token] int16: the experts that an engine took, -1 for a token without
        any; None where routing is not replayed.
    """

    keys: tuple[SampleKey, ...]
    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    sampled: torch.Tensor
    rollout_logp: torch.Tensor
    advantages: torch.Tensor
    metrics: dict[str, float]
    routing: torch.Tensor | None = None
