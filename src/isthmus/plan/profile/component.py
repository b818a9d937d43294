"""`Component`, a part of a model: lists of `Weight` (parameters) and `SavedTensor` (saved activations).

From these lists follow the parameter counts, operations, bytes, and the memory of a chip under each kind of
parallelism. Numbers of tokens are those of one micro-batch before sharding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ComponentKind = Literal["embedding", "attention", "dense", "experts", "norm", "head"]
Recompute = Literal["none", "selective", "full", "moe"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter tensor, or `copies` equal ones (experts)."""

    name: str
    matrix_elements: int = 0
    """Elements that multiply each token."""
    vector_elements: int = 0
    """Elements that are added, scaled by or looked up."""
    copies: int = 1
    active_copies: int = 1
    """Number of copies that each token uses."""
    max_pieces: int = 1
    """Largest number of tensor-parallel shards (1: replicated)."""
    expert: bool = False
    """Whether expert parallelism shards the copies."""
    trainable: bool = True
    """Whether it has a gradient and an optimizer state; a frozen weight has neither."""

    @property
    def parameters(self) -> int:
        """Elements in all copies."""
        return self.copies * (self.matrix_elements + self.vector_elements)

    @property
    def active_parameters(self) -> int:
        """Elements that one token uses (0 for a tied head, which uses the embedding's)."""
        return min(self.active_copies, self.copies) * (self.matrix_elements + self.vector_elements)

    def on_chip(self, shard: Sharding) -> int:
        """Return the elements on one chip: copies divided by `ep`, each divided by `tp` (experts: `etp`)."""
        copies = -(-self.copies // shard.ep) if self.expert else self.copies
        pieces = min(shard.etp if self.expert else shard.tp, self.max_pieces)
        return copies * -(-(self.matrix_elements + self.vector_elements) // pieces)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The sharding of one layer's tensors over chips."""

    tp: int = 1
    """Tensor parallelism."""
    sp: bool = False
    """Sequence parallelism: whether tokens are sharded over `tp` as well."""
    ep: int = 1
    """Expert parallelism."""
    etp: int = 1
    """Tensor parallelism of each expert."""
    routed_per_token: float | None = None
    """Mean number of routed copies per token that arrive at the chip; None: balanced routing."""


UNSHARDED = Sharding()
"""No sharding: one chip holds all tensors."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that the forward saves for the backward pass."""

    name: str
    width: float
    """Elements per token."""
    routed: bool = False
    """Whether each token counts once per expert that it is routed to."""
    per_key: bool = False
    """Whether each token counts once per token of its sequence."""
    element_bytes: float | None = None
    """Bytes per element, None for those of the compute precision."""
    cut: Literal["tp", "sp", "none"] = "sp"
    """Sharding: `tp` always shards the width, `sp` the tokens with sequence parallelism, `none` nothing."""
    max_pieces: int = 1 << 30
    """Largest number of shards of the width."""
    recomputable: bool = False
    """Whether selective recomputation drops it; element-wise work or saved query and key restore it."""
    longer_than: int | None = None
    """Saved only for sequences longer than this."""
    only_selective: bool = False
    """Saved only under selective recomputation."""
    below_fp32: bool = False
    """Saved only if the compute precision is narrower than fp32."""

    def num_bytes(
        self, tokens: float, sequence_length: int, precision_bytes: int, shard: Sharding = UNSHARDED
    ) -> float:
        """Return the bytes on one chip for `tokens` tokens (routed copies if `routed`)."""
        short = self.longer_than is not None and sequence_length <= self.longer_than
        if short or (self.below_fp32 and precision_bytes == 4):
            return 0.0
        each = self.element_bytes or precision_bytes
        width = self.width * (sequence_length if self.per_key else 1)
        tp = shard.etp if self.routed else shard.tp
        pieces = {"tp": min(tp, self.max_pieces), "sp": tp if shard.sp else 1, "none": 1}[self.cut]
        return tokens * width * each / pieces


@dataclass(frozen=True, kw_only=True)
class AttentionCore:
    """The attention core (scores and weighted sum), causal, over the last `window` tokens or all."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def mean_dim(self) -> float:
        """Elements of a head's key or value, their mean."""
        return (self.key_dim + self.value_dim) / 2

    def mean_keys(self, sequence_length: int) -> float:
        """Return the mean number of visible keys per query: (S + 1) / 2, or fewer with a window below S."""
        s, w = sequence_length, min(self.window or sequence_length, sequence_length)
        return (w * (w + 1) / 2 + (s - w) * w) / s

    def forward_flops(self, sequence_length: int, num_tokens: float) -> float:
        """Return 2 (key_dim + value_dim) operations per query, head and visible key."""
        per_key = 2 * self.num_heads * (self.key_dim + self.value_dim)
        return num_tokens * per_key * self.mean_keys(sequence_length)


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a layer, or an end of the model: its weights and saved activations."""

    name: str
    kind: ComponentKind
    weights: tuple[Weight, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    backward_steps: tuple[tuple[SavedTensor, ...], ...] = ()
    """For each step of the backward pass that may be the peak, the live tensors besides the saved ones; a
    negative width is freed by then."""
    core: AttentionCore | None = None
    kv_width: int = 0
    """KV-cache elements per token."""
    input_width: float | None = None
    """Elements per token of the first products' input; None: those of the saved input."""
    num_experts: int = 0
    experts_per_token: int = 0
    routing_groups: int = 1
    """Equal groups of the experts, `groups_per_token` of which a token chooses its experts from."""
    groups_per_token: int = 1
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
        """Parameters that multiply each token, with two operations each in the forward pass."""
        return sum(weight.active_copies * weight.matrix_elements for weight in self.weights)

    def forward_flops(self, sequence_length: int, num_tokens: float) -> float:
        """Return the operations of the forward pass: 2 per matrix parameter and token, plus attention core.

        Norms, activations, rotary embedding and softmax, less than 1 % in published models, are not counted.
        """
        core = self.core.forward_flops(sequence_length, num_tokens) if self.core else 0.0
        return 2.0 * self.matrix_parameters * num_tokens + core

    def backward_flops(self, sequence_length: int, num_tokens: float, recompute: Recompute = "none") -> float:
        """Return the operations of the backward pass: twice the forward, plus recomputation.

        `selective` repeats only element-wise work, which is not counted; `moe` repeats the routed experts'
        first products (two thirds of a gated expert's matrices).
        """
        forward = self.forward_flops(sequence_length, num_tokens)
        recomputed = {"none": 0.0, "selective": 0.0, "full": forward, "moe": 0.0}[recompute]
        if recompute == "moe":
            inner = sum(w.active_copies * w.matrix_elements for w in self.weights if w.expert and w.name != "down")
            recomputed = 2.0 * inner * num_tokens
        return 2 * forward + recomputed

    def on_chip(self, shard: Sharding) -> int:
        """Return the parameters that one chip holds."""
        return sum(weight.on_chip(shard) for weight in self.weights)

    def weight_bytes_read(self, num_tokens: float, precision_bytes: int) -> float:
        """Return the weight bytes read for `num_tokens` tokens, with balanced routing to experts."""
        parameters = 0.0
        for weight in self.weights:
            share = 1.0
            if weight.expert:
                share = 1 - (1 - weight.active_copies / weight.copies) ** num_tokens
            parameters += share * weight.parameters
        return parameters * precision_bytes

    def activation_bytes(
        self,
        tokens: float,
        sequence_length: int,
        precision_bytes: int,
        recompute: Recompute = "none",
        shard: Sharding = UNSHARDED,
    ) -> float:
        """Return the bytes saved for the backward pass on one chip.

        Recomputation `full` saves none (the layer saves its input), `selective` drops `recomputable` tensors, `moe`
        routed ones.
        """
        if recompute == "full":
            return 0.0
        kept = [
            saved
            for saved in self.saved
            if not (recompute == "selective" and saved.recomputable)
            and not (recompute == "moe" and saved.routed)
            and (recompute == "selective" or not saved.only_selective)
        ]
        return self._sum_bytes(kept, tokens, sequence_length, precision_bytes, shard)

    def working_bytes(
        self, tokens: float, sequence_length: int, precision_bytes: int, shard: Sharding = UNSHARDED
    ) -> float:
        """Return the peak bytes of the backward pass besides the saved tensors."""
        each = (self._sum_bytes(step, tokens, sequence_length, precision_bytes, shard) for step in self.backward_steps)
        return max(each, default=0.0)

    def _sum_bytes(
        self,
        tensors: Iterable[SavedTensor],
        tokens: float,
        sequence_length: int,
        precision_bytes: int,
        shard: Sharding,
    ) -> float:
        routed = self.experts_per_token if shard.routed_per_token is None else shard.routed_per_token
        # A sharded expert receives the tokens of all chips that share it.
        token_shards = shard.tp // shard.etp if shard.sp else 1
        arrived = tokens * routed / token_shards
        return sum(
            one.num_bytes(arrived if one.routed else tokens, sequence_length, precision_bytes, shard) for one in tensors
        )

    def bytes_moved(self, sequence_length: int, num_tokens: float, precision_bytes: int) -> float:
        """Return the memory traffic of a forward pass: weights read, saved tensors written and read once."""
        activations = self.activation_bytes(num_tokens, sequence_length, precision_bytes)
        return self.weight_bytes_read(num_tokens, precision_bytes) + 2 * activations


def input_width(part: Component) -> float:
    """Return the width of a component's input, its own or that of its saved input."""
    if part.input_width is not None:
        return part.input_width
    named = ("projection.input", "feed_forward.input", "head.input")
    return next((saved.width for saved in part.saved if saved.name in named), 1.0)
