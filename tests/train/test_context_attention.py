"""Rules of attention over shared sequences: result and gradients are those of one process, for every kind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from isthmus.train.context_parallel.attention_interface import ContextAttention
from isthmus.train.context_parallel.context_parallel_group import ContextKind, ContextParallelGroup
from isthmus.train.context_parallel.gather_attention import gather_attention
from isthmus.train.context_parallel.head_exchange import all_to_all_attention
from isthmus.train.context_parallel.ring_attention import ring_attention
from isthmus.train.context_parallel.tiled_attention import AttentionRule
from tests.train.context_groups import context_groups, each

KINDS: dict[ContextKind, ContextAttention] = {
    "ring": ring_attention,
    "gather": gather_attention,
    "all_to_all": all_to_all_attention,
}


def reference(parts: Sequence[torch.Tensor], rule: AttentionRule) -> torch.Tensor:
    """Return the attention of one process, under an explicit mask."""
    at = torch.arange(parts[0].shape[2])
    document = torch.bucketize(at, torch.tensor(rule.documents[1:]), right=True)
    distance = at.unsqueeze(1) - at
    sees = (distance >= 0) & (document.unsqueeze(1) == document)
    if rule.window is not None:
        sees &= distance < rule.window
    return scaled_dot_product_attention(*parts, attn_mask=sees, scale=rule.scale, enable_gqa=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weights", "documents", "window"),
    [
        ([1.0, 1.0], (0, 24), None),
        ([1.0] * 4, (0, 24), None),
        ([3.0, 1.0], (0, 24), None),
        ([1.0, 1.0], (0, 5, 6, 19, 24), None),
        ([2.0, 1.0, 1.0, 1.0], (0, 11, 24), 4),
    ],
)
def test_shared_attention_is_that_of_one_process(
    kind: ContextKind, weights: list[float], documents: tuple[int, ...], window: int | None
) -> None:
    """Equal and unequal shares, documents, windows, fewer key heads than query heads: result and all gradients."""
    generator = torch.Generator().manual_seed(3)
    heads = [8, 4, 4]
    parts = [torch.randn(2, count, 24, 16, generator=generator, requires_grad=True) for count in heads]
    gradient = torch.randn(2, 8, 24, 16, generator=generator)
    rule = AttentionRule(scale=0.3, documents=documents, window=window)
    expected = reference(parts, rule)
    expected.backward(gradient)

    def run(group: ContextParallelGroup) -> tuple[list[int], torch.Tensor, list[torch.Tensor]]:
        rows = list(group.share.positions)
        own = [one.detach()[:, :, rows].clone().requires_grad_() for one in parts]
        found = KINDS[kind](*own, group, rule)
        found.backward(gradient[:, :, rows])
        return rows, found.detach(), [one.grad for one in own if one.grad is not None]

    for rows, found, gradients in each(context_groups(24, weights, kind), run):
        torch.testing.assert_close(found, expected.detach()[:, :, rows], rtol=1e-5, atol=1e-6)
        for one, whole in zip(gradients, parts, strict=True):
            assert whole.grad is not None
            torch.testing.assert_close(one, whole.grad[:, :, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_attention_in_bf16_repeats_its_bits(kind: ContextKind) -> None:
    """Two runs give the same bits, near those of fp32."""
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(1, count, 32, 16, generator=generator).bfloat16() for count in (4, 4, 4)]
    rule = AttentionRule(scale=0.25, documents=(0, 32))
    exact = reference([one.float() for one in parts], rule)
    groups = context_groups(32, [1.0] * 4, kind)

    def run(group: ContextParallelGroup) -> list[torch.Tensor]:
        own = [one[:, :, list(group.share.positions)].clone().requires_grad_() for one in parts]
        found = KINDS[kind](*own, group, rule)
        found.sum().backward()
        return [found.detach(), *(one.grad for one in own if one.grad is not None)]

    first, second = each(groups, run), each(groups, run)
    for group, of_first, of_second in zip(groups, first, second, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(of_first, of_second, strict=True))
        assert of_first[0].dtype == torch.bfloat16
        torch.testing.assert_close(of_first[0].float(), exact[:, :, list(group.share.positions)], rtol=0.05, atol=0.02)
