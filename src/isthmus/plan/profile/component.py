"""What a part of a model costs, as data: `Weight` (parameters) and `Saved` (activations kept for the backward
pass).

Everything else is derived from these two lists: parameter counts, operations, bytes, and what a chip holds
under each kind of parallelism. A number of tokens is always that of one micro-batch before it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["embedding", "attention", "dense", "experts", "norm", "head"]
Recompute = Literal["none", "selective", "full", "moe"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full", "moe")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter tensor, or `copies` equal ones of which each token uses `active`.

    `matrix` counts the elements that multiply a token, `vector` those that are added, scaled by or looked up.
    Tensor parallelism cuts it into at most `cut` pieces (1: every chip holds it whole); copies are experts
    and are dealt out by expert parallelism.
    """

    name: str
    matrix: int = 0
    vector: int = 0
    copies: int = 1
    active: int = 1
    cut: int = 1
    expert: bool = False

    @property
    def parameters(self) -> int:
        """Elements in all copies."""
        return self.copies * (self.matrix + self.vector)

    @property
    def active_parameters(self) -> int:
        """Elements that one token uses (none of a tied head: they are the embedding's)."""
        return min(self.active, self.copies) * (self.matrix + self.vector)

    def on_chip(self, shard: Sharding) -> int:
        """Return the elements on one chip: copies dealt over `ep`, each cut by `tp` (experts: by `etp`)."""
        copies = -(-self.copies // shard.ep) if self.expert else self.copies
        pieces = min(shard.etp if self.expert else shard.tp, self.cut)
        return copies * -(-(self.matrix + self.vector) // pieces)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one stage's tensors are cut on a chip: `tp` pieces, tokens too where `sp` (sequence parallelism).

    Experts are dealt over `ep` chips and each cut into `etp` pieces. `routed_per_token` is how many routed
    copies of a token arrive on average; without it, as many as balanced routing sends (`experts_per_token`).
    """

    tp: int = 1
    sp: bool = False
    ep: int = 1
    etp: int = 1
    routed_per_token: float | None = None


WHOLE = Sharding()
"""One chip holds everything."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One tensor kept from the forward for the backward pass: `width` elements for each token.

    `routed` counts each token once per expert it is sent to; `per_key` once per token of its sequence.
    `bytes_each` is fixed where the operation has its own format (4: fp32 whatever the precision), else that
    of the compute precision. `cut` says what tensor parallelism does: `tp` always cuts the width (into at
    most `pieces`), `sp` cuts the tokens only with sequence parallelism, `none` never. `cheap` tensors are
    those that selective recomputation drops and brings back with element-wise work or from the kept query and
    key. `beyond`: kept only for sequences longer than this; `narrow`: only where the compute precision is
    narrower than fp32.
    """

    name: str
    width: float
    routed: bool = False
    per_key: bool = False
    bytes_each: int | None = None
    cut: Literal["tp", "sp", "none"] = "sp"
    pieces: int = 1 << 30
    cheap: bool = False
    beyond: int | None = None
    narrow: bool = False

    def num_bytes(
        self, tokens: float, sequence_length: int, precision_bytes: int, shard: Sharding = WHOLE
    ) -> float:
        """Return the bytes on one chip for `tokens` tokens (routed ones where `routed`)."""
        short = self.beyond is not None and sequence_length <= self.beyond
        if short or (self.narrow and precision_bytes == 4):
            return 0.0
        each = self.bytes_each or precision_bytes
        width = self.width * (sequence_length if self.per_key else 1)
        tp = shard.etp if self.routed else shard.tp
        pieces = {"tp": min(tp, self.pieces), "sp": tp if shard.sp else 1, "none": 1}[self.cut]
        return tokens * width * each / pieces


@dataclass(frozen=True, kw_only=True)
class AttentionCore:
    """Scores and weighted sum: `key_dim` and `value_dim` per head; `window` tokens back, or all before it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def mean_keys(self, sequence_length: int) -> float:
        """Return the keys a query sees on average: (S + 1) / 2 under the causal mask, fewer with a window W <
        S.
        """
        s, w = sequence_length, min(self.window or sequence_length, sequence_length)
        return (w * (w + 1) / 2 + (s - w) * w) / s

    def forward_flops(self, sequence_length: int, num_tokens: float) -> float:
        """Return 2 (key_dim + value_dim) operations per query, head and visible key."""
        per_key = 2 * self.num_heads * (self.key_dim + self.value_dim)
        return num_tokens * per_key * self.mean_keys(sequence_length)


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a layer, or of the model's ends: weights, saved activations, and what follows from them.

    `steps` lists, for each step of the backward pass that may be the fullest, what is alive then beyond what
    is kept (a negative width has been freed by then).
    """

    name: str
    kind: Kind
    weights: tuple[Weight, ...] = ()
    saved: tuple[Saved, ...] = ()
    steps: tuple[tuple[Saved, ...], ...] = ()
    core: AttentionCore | None = None
    kv_width: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(weight.parameters for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return sum(weight.active_parameters for weight in self.weights)

    @property
    def matrix_parameters(self) -> int:
        """Parameters that multiply each token: two operations each in the forward pass."""
        return sum(weight.active * weight.matrix for weight in self.weights)

    def forward_flops(self, sequence_length: int, num_tokens: float) -> float:
        """Return the operations of the forward pass: 2 per matrix parameter and token, plus the attention
        core.

        Norms, activations, rotary embedding and softmax (below 1 % of any published model) are not counted.
        """
        core = self.core.forward_flops(sequence_length, num_tokens) if self.core else 0.0
        return 2.0 * self.matrix_parameters * num_tokens + core

    def backward_flops(self, sequence_length: int, num_tokens: float, recompute: Recompute = "none") -> float:
        """Return the operations of the backward pass: twice the forward, plus the forward that is computed
        again.

        `selective` repeats element-wise work only, which is not counted; `moe` repeats the routed experts'
        first products (two thirds of a gated expert's matrices).
        """
        forward = self.forward_flops(sequence_length, num_tokens)
        again = {"none": 0.0, "selective": 0.0, "full": forward, "moe": 0.0}[recompute]
        if recompute == "moe":
            inner = sum(w.active * w.matrix for w in self.weights if w.expert and w.name != "down")
            again = 2.0 * inner * num_tokens
        return 2 * forward + again

    def on_chip(self, shard: Sharding) -> int:
        """Return the parameters that one chip holds."""
        return sum(weight.on_chip(shard) for weight in self.weights)

    def weight_bytes_read(self, num_tokens: float, precision_bytes: int) -> float:
        """Return the weight bytes read once by `num_tokens` tokens: of experts, those that balanced routing
        meets.
        """
        met = 0.0
        for weight in self.weights:
            share = 1.0
            if weight.expert:
                share = 1 - (1 - weight.active / weight.copies) ** num_tokens
            met += share * weight.parameters
        return met * precision_bytes

    def activation_bytes(
        self,
        tokens: float,
        sequence_length: int,
        precision_bytes: int,
        recompute: Recompute = "none",
        shard: Sharding = WHOLE,
    ) -> float:
        """Return the bytes kept for the backward pass on one chip.

        `full` keeps nothing here (the layer keeps its input), `selective` drops what is `cheap`, `moe` what
        is routed.
        """
        if recompute == "full":
            return 0.0
        kept = [
            saved
            for saved in self.saved
            if not (recompute == "selective" and saved.cheap) and not (recompute == "moe" and saved.routed)
        ]
        return self._sum(kept, tokens, sequence_length, precision_bytes, shard)

    def working_bytes(
        self, tokens: float, sequence_length: int, precision_bytes: int, shard: Sharding = WHOLE
    ) -> float:
        """Return the most bytes its backward pass has alive beyond what is kept."""
        each = (self._sum(step, tokens, sequence_length, precision_bytes, shard) for step in self.steps)
        return max(each, default=0.0)

    def _sum(
        self,
        tensors: Iterable[Saved],
        tokens: float,
        sequence_length: int,
        precision_bytes: int,
        shard: Sharding,
    ) -> float:
        routed = self.experts_per_token if shard.routed_per_token is None else shard.routed_per_token
        apart = (
            shard.tp // shard.etp if shard.sp else 1
        )  # experts that are cut see the tokens of all who share them
        arrived = tokens * routed / apart
        return sum(
            one.num_bytes(arrived if one.routed else tokens, sequence_length, precision_bytes, shard)
            for one in tensors
        )

    def bytes_moved(self, sequence_length: int, num_tokens: float, precision_bytes: int) -> float:
        """Return the traffic of a forward pass: weights read once, kept tensors written and read once."""
        activations = self.activation_bytes(num_tokens, sequence_length, precision_bytes)
        return self.weight_bytes_read(num_tokens, precision_bytes) + 2 * activations
