"""`exchange_tokens`: the experts module of a layer computes its own experts for the tokens of all ranks of a group.

Each choice of an expert by a token sends the token's hidden state to the rank of that expert, and its result back: no
padding, no capacity, no dropped token. Between both the experts module of transformers runs as it is, on rows with one
choice each; routing weights stay with the token. Source: D. Lepikhin et al., "GShard" (ICLR 2021), section 3.2, here
with uneven messages instead of a capacity.

Shapes: T tokens of this rank, k choices of a token, H hidden size, E experts of the layer, L of them on this rank, N
rows that this rank computes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup
from isthmus.train.liveness.peer_wait import waiting_for_peer


def exchange_tokens(experts: nn.Module, group: ExpertParallelGroup, *, tp_rank: int = 0, tp_size: int = 1) -> None:
    """Let the module `experts`, which holds this rank's experts alone, compute for all ranks of `group`.

    Its input and result are those of a module with all experts: hidden states [T, H], expert numbers [T, k] and weights
    [T, k] give [T, H]. With `tp_size` above 1 these ranks have the same tokens: each sends its part, and has zeros
    for the tokens of the others in its result, which the ranks sum.
    """
    experts.num_experts = experts.gate_up_proj.shape[0]
    if group.size > 1:
        exchange = _TokenExchange(group, tp_rank, tp_size)
        experts.register_forward_pre_hook(exchange.dispatch)
        experts.register_forward_hook(exchange.combine)


@dataclass(frozen=True, kw_only=True)
class _Route:
    """The way of T x k choices, in the order of their experts, to the ranks that have these."""

    group: ExpertParallelGroup
    # Rows to and from each rank.
    sent: list[int]
    received: list[int]
    thread: int

    def go(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what all ranks send here of their `rows` [T k, H]: [N, H]."""
        with waiting_for_peer(self.thread):  # on a device autograd may run in a thread of its own
            return self.group.start(rows, self.sent, self.received).wait()

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what has become of the rows that this rank has sent [T k, H], given those that came here [N, H]."""
        with waiting_for_peer(self.thread):
            return self.group.start(rows, self.received, self.sent).wait()


@dataclass(frozen=True)
class _Call:
    """What `combine` needs of the call of `dispatch` before it."""

    route: _Route
    # [T k]: choices in the order of their experts.
    order: torch.Tensor
    # [T, k], of this rank's part of the tokens.
    weights: torch.Tensor
    # First token of that part, and the number of all.
    first: int
    num_tokens: int


class _TokenExchange:
    """The hooks before and after the forward of an experts module."""

    def __init__(self, group: ExpertParallelGroup, tp_rank: int, tp_size: int) -> None:
        self._group, self._tp_rank, self._tp_size = group, tp_rank, tp_size
        self._call: _Call | None = None

    def dispatch(self, experts: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Replace hidden states, expert numbers and weights by rows [N, H], their experts here [N, 1], and ones."""
        hidden, chosen, weights = args
        num_tokens = len(hidden)
        first, end = (num_tokens * at // self._tp_size for at in (self._tp_rank, self._tp_rank + 1))
        hidden, chosen, weights = hidden[first:end], chosen[first:end], weights[first:end]
        num_here, size = experts.num_experts, self._group.size
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=num_here * size).view(size, num_here)
        arriving = self._group.exchange_counts(counts)
        route = _Route(
            group=self._group,
            sent=counts.sum(1).tolist(),
            received=arriving.sum(1).tolist(),
            thread=threading.get_ident(),
        )
        order = torch.argsort(flat, stable=True)
        self._call = _Call(route, order, weights, first, num_tokens)
        rows: torch.Tensor = _Dispatch.apply(hidden, order, route, chosen.shape[1])
        numbers = torch.arange(num_here, device=rows.device).repeat(size)
        return rows, numbers.repeat_interleave(arriving.reshape(-1)).unsqueeze(1), rows.new_ones(len(rows), 1)

    def combine(self, experts: nn.Module, args: tuple[torch.Tensor, ...], results: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, H] of the results [N, H] of all choices."""
        call, self._call = self._call, None
        if call is None:
            raise RuntimeError("results of experts without a dispatch")
        if not len(results):
            results = _connect(args[0], experts)
        found: torch.Tensor = _Combine.apply(results, call.order, call.route)
        mixed = (found.view(*call.weights.shape, found.shape[1]) * call.weights.unsqueeze(-1)).sum(1).to(results.dtype)
        behind = call.num_tokens - call.first - len(mixed)
        return nn.functional.pad(mixed, (0, 0, call.first, behind)) if len(mixed) < call.num_tokens else mixed


def _connect(rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
    """Return `rows` [0, H] with all parameters of `experts` behind them, of gradient zero.

    A rank without rows so exchanges in the backward as others do, and adds to its gradients as often.
    """
    return rows + sum(parameter.flatten()[:1].sum() for parameter in experts.parameters())


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, route: _Route, num_choices: int) -> torch.Tensor:
        """Return the rows [N, H] of all ranks for this rank's experts, given hidden states [T, H]."""
        ctx.route, ctx.num_choices = route, num_choices
        ctx.save_for_backward(order)
        return route.go(hidden.index_select(0, order // num_choices))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        route: _Route = ctx.route
        by_choice = _by_token(route.back(gradients[0]), *ctx.saved_tensors)
        tokens = len(by_choice) // ctx.num_choices
        return by_choice.view(tokens, ctx.num_choices, by_choice.shape[1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, order: torch.Tensor, route: _Route) -> torch.Tensor:
        """Return the results [T k, H] of this rank's tokens, token by token, given those computed here [N, H]."""
        ctx.route = route
        ctx.save_for_backward(order)
        return _by_token(route.back(results), order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        route: _Route = ctx.route
        return route.go(gradients[0].index_select(0, order)), None, None


def _by_token(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows` [T k, H], which are of the choices `order` [T k], token by token."""
    result = torch.empty_like(rows)
    result[order] = rows
    return result
