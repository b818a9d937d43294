"""`chunked_loss`: head and cross entropy by chunks of tokens; the logits of all tokens never exist at a time.

The forward keeps one number per token, the logarithm of its normaliser; the backward computes the logits of a chunk
again, and from them the gradients. Source: P. Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training"
(2024), section 3.2, which computes the gradients in the forward instead: it saves one product of the head, and keeps a
gradient of the head's weight for each micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup

LOSS_CHUNK_BYTES = 256 << 20
"""Most bytes of the fp32 logits of a chunk; at a vocabulary of 131,072 these are 512 tokens."""


def tokens_per_chunk(vocab_size: int, tp_size: int, chunk_bytes: int = LOSS_CHUNK_BYTES) -> int:
    """Return the tokens of a chunk, at least 1: equal on all `tp_size` ranks that share a vocabulary."""
    return max(chunk_bytes // (4 * -(-vocab_size // tp_size)), 1)


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int,
    ignored_label: int,
    first_token: int = 0,
    group: TensorParallelGroup | None = None,
) -> torch.Tensor:
    """Return the cross entropies (fp32, in nats) [B S] of all labels, 0 for `ignored_label`.

    `hidden` `[B, S, H]` are the inputs of the head, `weight` `[V / tp, H]` its rows from `first_token` on; `labels`
    `[B, S]` are ids of the full vocabulary. Each rank of `group` gets the same values, the gradient of its own rows,
    and its own part of that of `hidden`.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    shared = group or TensorParallelGroup()
    result: torch.Tensor = _ChunkedCrossEntropy.apply(
        flat, weight, labels.reshape(-1), chunk_tokens, ignored_label, first_token, shared
    )
    return result


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
        ignored_label: int,
        first_token: int,
        group: TensorParallelGroup,
    ) -> torch.Tensor:
        """Return the cross entropies [N] for hidden states [N, H], weight [V / tp, H] and labels [N]."""
        normaliser = hidden.new_empty(len(hidden), dtype=torch.float32)
        target = torch.empty_like(normaliser)
        # Step 1: normaliser and target logit of each token over this rank's vocabulary.
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = functional.linear(hidden[rows], weight).float()
            place, mine = _place(labels[rows], first_token, len(weight))
            target[rows] = logits.gather(-1, place).squeeze(-1).masked_fill(~mine, 0.0)
            largest = logits.amax(-1)
            total = logits.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
            normaliser[rows] = total.log_().add_(largest)
            del logits
        # Step 2: merge those of the ranks that share the vocabulary.
        if group.size > 1:
            largest = group.all_reduce_max(normaliser)
            total, target = group.all_reduce_sum(torch.stack(((normaliser - largest).exp(), target)))
            normaliser = total.log() + largest
        ctx.save_for_backward(hidden, weight, labels, normaliser)
        ctx.sizes = chunk_tokens, ignored_label, first_token
        return (normaliser - target).masked_fill(labels == ignored_label, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden states [N, H] and weight [V / tp, H]; the weight's is summed in fp32."""
        hidden, weight, labels, normaliser = ctx.saved_tensors
        chunk_tokens, ignored_label, first_token = ctx.sizes
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        scale = gradients[0] * (labels != ignored_label)
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = functional.linear(hidden[rows], weight).float()
            gradient = logits.sub_(normaliser[rows].unsqueeze(-1)).exp_()
            place, mine = _place(labels[rows], first_token, len(weight))
            gradient.scatter_add_(-1, place, -mine.unsqueeze(-1).float())
            narrow = gradient.mul_(scale[rows].unsqueeze(-1)).to(weight.dtype)
            del logits, gradient
            torch.mm(narrow, weight, out=of_hidden[rows])
            _add_product(of_weight, narrow, hidden[rows])
            del narrow
        return of_hidden, of_weight.to(weight.dtype), None, None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens))


def _place(labels: torch.Tensor, first_token: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column [n, 1] of each label among this rank's rows, and whether it is there [n]."""
    place = labels - first_token
    mine = (place >= 0) & (place < num_rows)
    return place.masked_fill(~mine, 0).unsqueeze(-1), mine


def _add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add to fp32 `total` [V, H] the product of `gradient` [n, V] and `hidden` [n, H]."""
    if gradient.dtype == torch.float32:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(gradient.t() @ hidden)
