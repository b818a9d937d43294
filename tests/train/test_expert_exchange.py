"""Rules of shared experts: results and gradients are those of one module, and each byte is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from isthmus.core.errors import PeerError
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup
from isthmus.train.expert_parallel.token_exchange import exchange_tokens
from isthmus.train.model.transformers_model import choose_expert_kernels
from tests.train.expert_threads import each, joined_groups

EXPERTS, CHOICES, WIDTH, INNER = 8, 2, 16, 24

Routing = Callable[[int, torch.Generator], torch.Tensor]
"""Returns the experts [T, CHOICES] of T tokens."""


def random_experts(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Return unlike experts for each token."""
    return torch.rand(num_tokens, EXPERTS, generator=generator).topk(CHOICES).indices


def first_experts(num_tokens: int, _: torch.Generator) -> torch.Tensor:
    """Return the first two experts for all tokens: other ranks compute nothing."""
    return torch.arange(CHOICES).expand(num_tokens, CHOICES)


def experts_in_turn(num_tokens: int, _: torch.Generator) -> torch.Tensor:
    """Return each expert equally often."""
    return (torch.arange(num_tokens * CHOICES) % EXPERTS).view(num_tokens, CHOICES)


def whole_module() -> nn.Module:
    """Return a module of all experts with random weights."""
    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS)
    choose_expert_kernels(config, "cpu")
    module, generator = MixtralExperts(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def own_module(group: ExpertParallelGroup, **options: int) -> nn.Module:
    """Return the module of a rank of `group`, with its experts alone."""
    module, each_has = whole_module(), EXPERTS // group.size
    rows = slice(group.expert_rank * each_has, (group.expert_rank + 1) * each_has)
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach()[rows].clone())
    module.down_proj = nn.Parameter(module.down_proj.detach()[rows].clone())
    exchange_tokens(module, group, **options)
    return module


def tokens_of(rank: int, num_tokens: int, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, experts and weights of a rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator)
    weights = torch.rand(num_tokens, CHOICES, generator=generator)
    return hidden.requires_grad_(), routing(num_tokens, generator), weights.requires_grad_()


@pytest.mark.parametrize("routing", [random_experts, first_experts])
@pytest.mark.parametrize("counts", [[6, 6], [7, 1], [5, 0, 3, 4]])
def test_shared_experts_compute_what_one_module_computes(counts: list[int], routing: Routing) -> None:
    """Unlike numbers of tokens, also none, and ranks that no token chooses: results and all gradients."""
    groups, whole, expected = joined_groups(len(counts)), whole_module(), []
    for rank, count in enumerate(counts):
        parts = tokens_of(rank, count, routing)
        result = whole(*parts) + 0 * parts[0] + 0 * parts[2].sum(1, keepdim=True)  # has gradients without tokens too
        (result * (rank + 1)).square().sum().backward()
        expected.append((result.detach(), parts[0].grad, parts[2].grad))

    def run(group: ExpertParallelGroup) -> tuple[nn.Module, tuple[torch.Tensor | None, ...]]:
        rank, module = group.expert_rank, own_module(group)
        parts = tokens_of(rank, counts[rank], routing)
        result = module(*parts)
        (result * (rank + 1)).square().sum().backward()
        return module, (result.detach(), parts[0].grad, parts[2].grad)

    found = each(groups, run)
    for (_, tensors), others in zip(found, expected, strict=True):
        for one, other in zip(tensors, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for name in ("gate_up_proj", "down_proj"):
        whole_gradient = whole.get_parameter(name).grad
        gradients = [module.get_parameter(name).grad for module, _ in found]
        assert all(one is not None for one in gradients), "an expert without tokens has a gradient of zero"
        torch.testing.assert_close(torch.cat(gradients), whole_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_of_an_exchange_are_those_of_the_choices(size: int) -> None:
    """Even routing: tokens x k x H x (ep - 1) / ep in each of two exchanges, forward and backward."""
    num_tokens = 12

    def run(group: ExpertParallelGroup) -> list[int]:
        hidden, chosen, weights = tokens_of(group.expert_rank, num_tokens, experts_in_turn)
        result = own_module(group)(hidden, chosen, weights)
        forward = group.sent_bytes
        result.sum().backward()
        return [forward, group.sent_bytes - forward]

    one_way = num_tokens * CHOICES * WIDTH * 4 * (size - 1) // size
    assert each(joined_groups(size), run) == [[2 * one_way, 2 * one_way]] * size


def test_tensor_parallel_ranks_send_each_token_once() -> None:
    """Ranks with the same tokens send a part each; their sum is the result, and that of their gradients too."""
    whole, parts = whole_module(), tokens_of(0, 7, random_experts)
    expected = whole(*parts)
    expected.square().sum().backward()

    def run(group: ExpertParallelGroup) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        own = tokens_of(0, 7, random_experts)
        result = own_module(group, tp_rank=group.expert_rank, tp_size=2)(*own)
        result.backward(2 * expected.detach())
        return result.detach(), own[0].grad, group.sent_bytes

    found = each(joined_groups(2), run)
    torch.testing.assert_close(found[0][0] + found[1][0], expected.detach(), rtol=1e-5, atol=1e-5)
    assert found[0][1] is not None
    assert found[1][1] is not None
    torch.testing.assert_close(found[0][1] + found[1][1], parts[0].grad, rtol=1e-5, atol=1e-5)
    assert sum(num_bytes for *_, num_bytes in found) <= 4 * 7 * CHOICES * WIDTH * 4


def test_a_lost_rank_is_named() -> None:
    """An error of the process group says that a rank of the experts is lost."""

    class Broken:
        def all_to_all_single(self, *_: object) -> None:
            raise RuntimeError("Connection closed by peer")

    group = ExpertParallelGroup(0, (0, 1))
    group.join(Broken())
    with pytest.raises(PeerError, match="lost a rank of the expert-parallel group"):
        group.exchange_counts(torch.zeros(2, 4, dtype=torch.int64))
