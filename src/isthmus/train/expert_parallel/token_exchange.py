"""`exchange_tokens`: the experts module of a layer computes its own experts for the tokens of all ranks of a group.

Each choice of an expert by a token sends the token's hidden state to the rank of that expert, and its result back: no
padding, no capacity, no dropped token. Between both the experts module of transformers runs as it is, on rows with one
choice each; routing weights stay with the token. Source: D. Lepikhin et al., "GShard" (ICLR 2021), section 3.2, here
with uneven messages instead of a capacity.

A shared expert (`Meanwhile`) is computed while rows are under way, one part for each way, in the backward pass too: the
start of an exchange and its end are two operations, and autograd runs what was computed between them between them.

Shapes: T tokens of this rank, k choices of a token, H hidden size, E experts of the layer, L of them on this rank, N
rows that this rank computes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup, PendingRows
from isthmus.train.liveness.peer_wait import waiting_for_peer


class Meanwhile(Protocol):
    """What a rank computes while rows are under way: first to the experts, then back."""

    def on_the_way(self) -> None:
        """Compute the first part."""
        ...

    def on_the_way_back(self) -> None:
        """Compute the second part."""
        ...


def exchange_tokens(
    experts: nn.Module, group: ExpertParallelGroup, *, tp_rank: int = 0, tp_size: int = 1
) -> TokenExchange:
    """Let the module `experts`, which holds this rank's experts alone, compute for all ranks of `group`.

    Its input and result are those of a module with all experts: hidden states [T, H], expert numbers [T, k] and weights
    [T, k] give [T, H]. With `tp_size` above 1 these ranks have the same tokens: each sends its part, and has zeros
    for the tokens of the others in its result, which the ranks sum.
    """
    experts.num_experts = experts.gate_up_proj.shape[0]
    exchange = TokenExchange(group, tp_rank, tp_size)
    if group.size > 1:
        experts.register_forward_pre_hook(exchange.dispatch)
        experts.register_forward_hook(exchange.combine)
    return exchange


@dataclass(frozen=True, kw_only=True)
class _Route:
    """The way of T x k choices, in the order of their experts, to the ranks that have these."""

    group: ExpertParallelGroup
    # Rows to and from each rank.
    sent: list[int]
    received: list[int]
    thread: int

    def go(self, rows: torch.Tensor) -> _Flight:
        """Send `rows` [T k, H] to their experts; those of all ranks for this one's experts, [N, H], arrive."""
        return self._start(rows, self.sent, self.received)

    def back(self, rows: torch.Tensor) -> _Flight:
        """Send `rows` [N, H] back to where they came from; what has become of those sent, [T k, H], arrives."""
        return self._start(rows, self.received, self.sent)

    def _start(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> _Flight:
        with waiting_for_peer(self.thread):  # on a device autograd may run in a thread of its own
            return _Flight(self.group.start(rows, sent, received), (sum(received), rows.shape[1]), self.thread)


@dataclass(frozen=True)
class _Flight:
    """Rows of `shape` under way."""

    pending: PendingRows
    shape: tuple[int, int]
    thread: int

    def land(self) -> torch.Tensor:
        """Wait for the rows and return them."""
        with waiting_for_peer(self.thread):
            return self.pending.wait()


@dataclass
class _Passage:
    """One way of the rows of a call, and the gradients' way back; each is under way from its start to its end."""

    route: _Route
    under_way: _Flight | None = None

    def arrived(self) -> torch.Tensor:
        """Wait for the rows under way and return them; their memory is the caller's."""
        flight, self.under_way = self.under_way, None
        if flight is None:
            raise RuntimeError("rows of experts are awaited that no rank was asked for")
        return flight.land()


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


class TokenExchange:
    """The hooks before and after the forward of an experts module; `meanwhile` is of the next call."""

    def __init__(self, group: ExpertParallelGroup, tp_rank: int, tp_size: int) -> None:
        self._group, self._tp_rank, self._tp_size = group, tp_rank, tp_size
        self.meanwhile: Meanwhile | None = None
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
        way = _Passage(route)
        under_way = _StartDispatch.apply(hidden, order, way, chosen.shape[1])
        if self.meanwhile is not None:
            self.meanwhile.on_the_way()
        rows: torch.Tensor = _FinishDispatch.apply(under_way, way)
        numbers = torch.arange(num_here, device=rows.device).repeat(size)
        return rows, numbers.repeat_interleave(arriving.reshape(-1)).unsqueeze(1), rows.new_ones(len(rows), 1)

    def combine(self, experts: nn.Module, args: tuple[torch.Tensor, ...], results: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, H] of the results [N, H] of all choices."""
        call, self._call = self._call, None
        if call is None:
            raise RuntimeError("results of experts without a dispatch")
        if not len(results):
            results = _connect(args[0], experts)
        way = _Passage(call.route)
        under_way = _StartCombine.apply(results, way)
        if self.meanwhile is not None:
            self.meanwhile.on_the_way_back()
        self.meanwhile = None
        found: torch.Tensor = _FinishCombine.apply(under_way, call.order, way)
        mixed = (found.view(*call.weights.shape, found.shape[1]) * call.weights.unsqueeze(-1)).sum(1).to(results.dtype)
        behind = call.num_tokens - call.first - len(mixed)
        return nn.functional.pad(mixed, (0, 0, call.first, behind)) if len(mixed) < call.num_tokens else mixed


def _connect(rows: torch.Tensor, experts: nn.Module) -> torch.Tensor:
    """Return `rows` [0, H] with all parameters of `experts` behind them, of gradient zero.

    A rank without rows so exchanges in the backward as others do, and adds to its gradients as often.
    """
    return rows + sum(parameter.flatten()[:1].sum() for parameter in experts.parameters())


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, order: torch.Tensor, way: _Passage, num_choices: int) -> torch.Tensor:
        """Start to send hidden states [T, H] to their experts; the result, [N, H], has no values and no memory."""
        ctx.way, ctx.num_choices = way, num_choices
        ctx.save_for_backward(order)
        way.under_way = way.route.go(hidden.index_select(0, order // num_choices))
        return _no_values(hidden, way.under_way)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        by_choice = _by_token(ctx.way.arrived(), *ctx.saved_tensors)
        tokens = len(by_choice) // ctx.num_choices
        return by_choice.view(tokens, ctx.num_choices, by_choice.shape[1]).sum(1), None, None, None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, way: _Passage) -> torch.Tensor:
        """Return the rows [N, H] of all ranks for this rank's experts."""
        ctx.way = way
        return way.arrived()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        way: _Passage = ctx.way
        way.under_way = way.route.back(gradients[0])
        return _no_values(gradients[0], gradients[0]), None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, way: _Passage) -> torch.Tensor:
        """Start to send results [N, H] back to their tokens; the result, [T k, H], has no values and no memory."""
        ctx.way = way
        way.under_way = way.route.back(results)
        return _no_values(results, way.under_way)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        way: _Passage = ctx.way
        return way.arrived(), None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, order: torch.Tensor, way: _Passage) -> torch.Tensor:
        """Return the results [T k, H] of this rank's tokens, token by token."""
        ctx.way = way
        ctx.save_for_backward(order)
        return _by_token(way.arrived(), order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        way: _Passage = ctx.way
        way.under_way = way.route.go(gradients[0].index_select(0, order))
        return _no_values(gradients[0], gradients[0]), None, None


def _no_values(like: torch.Tensor, shape: _Flight | torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape that stands for rows under way: one zero, seen as all elements."""
    return like.new_zeros(()).expand(shape.shape)


def _by_token(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows` [T k, H], which are of the choices `order` [T k], token by token."""
    result = torch.empty_like(rows)
    result[order] = rows
    return result
