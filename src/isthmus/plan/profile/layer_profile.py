"""`ModelProfile` and `LayerProfile`: parameters, operations, bytes and memory of a model and of each of its layers.

All are sums over `Component`s. `profile_model` makes them from a `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.core.stack import DEFAULT_EXCHANGES, Stack, TensorParallelExchanges, TrafficRule, find_stack
from isthmus.plan.profile.component import UNSHARDED, Component, Recompute, Sharding
from isthmus.plan.profile.layer_shapes import AttentionShape

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RepeatedWork:
    """What selective recomputation repeats in a layer, beside the weights and the core that it names."""

    traffic_share: float
    """Share of the layer's saved bytes that are written again."""
    num_tp_exchanges: float = 0.0
    """All-reduces of tensor parallelism that are repeated."""
    expert_exchanges: bool = False
    """Whether tokens are sent to their experts and back again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerProfile:
    """One decoder layer: attention, feed-forward (dense or experts) and norms."""

    hidden_size: int
    attention: Component
    feed_forward: Component
    norms: Component
    repeated_weights: tuple[str, ...] = ()
    """Weights whose products selective recomputation repeats."""
    repeats_attention: bool = True
    """Whether selective recomputation repeats the attention core."""
    traffic_ratio: float = 1.0
    """Memory traffic of element-wise work over twice the saved bytes."""
    traffic: tuple[TrafficRule, ...] = ()
    """Bytes of element-wise work by operator, those of the stack at the plan's precision."""
    repeated_traffic_share: float = 0.5
    """Share of the forward pass's element-wise traffic that selective recomputation repeats."""
    num_repeated_exchanges: float = 0.0
    """All-reduces of tensor parallelism that selective recomputation repeats."""
    exchanges: TensorParallelExchanges = DEFAULT_EXCHANGES
    """How the stack exchanges what chips share of the layer."""
    narrow_products: bool = False
    """Whether products take inputs of 8 bits or less."""
    attention_kernel: str = "any"
    """The attention kernel of the stack, by which chips state sustained rates."""
    attention_shape: AttentionShape | None = None
    """Dimensions that the attention was made of, from which another kernel makes it again."""
    repeated: RepeatedWork | None = None
    """What selective recomputation of chosen modules repeats; None: as the stack does."""
    launch_ratio: float = 1.0
    """Kernel launches over those of a layer that is not compiled."""
    expert_launch_ratio: float = 0.0
    """Launches of the products of one expert on the chip, over those of a layer."""

    @property
    def components(self) -> tuple[Component, ...]:
        """The components of the layer."""
        return (self.norms, self.attention, self.feed_forward)

    @property
    def exchanged_kv_width(self) -> int:
        """Elements per token of the keys and values that chips exchange which share a sequence.

        Those of the layer, or with `expands_keys` repeated for every query head.
        """
        core = self.attention.core
        if core is None or not self.exchanges.expands_keys:
            return self.attention.kv_width
        return core.num_heads * (core.key_dim + core.value_dim)

    @property
    def kind(self) -> str:
        """The kind of layer, such as `"full dense"` or `"window experts"`."""
        window = self.attention.core.window if self.attention.core else None
        return f"{'window' if window else 'full'} {self.feed_forward.kind}"

    @property
    def parameters(self) -> int:
        """All parameters of the layer."""
        return sum(part.parameters for part in self.components)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return sum(part.active_parameters for part in self.components)

    def forward_flops(self, sequence_length: int, num_tokens: float) -> float:
        """Return the operations of a forward pass over `num_tokens` tokens."""
        return sum(part.forward_flops(sequence_length, num_tokens) for part in self.components)

    def backward_flops(self, sequence_length: int, num_tokens: float, recompute: Recompute = "none") -> float:
        """Return the operations of the backward pass, including recomputation."""
        return sum(part.backward_flops(sequence_length, num_tokens, recompute) for part in self.components)

    def bytes_moved(self, sequence_length: int, num_tokens: float, precision_bytes: int) -> float:
        """Return the memory traffic of a forward pass: weights read, saved tensors written and read once."""
        return sum(part.bytes_moved(sequence_length, num_tokens, precision_bytes) for part in self.components)

    def on_chip(self, shard: Sharding) -> int:
        """Return the parameters that one chip holds."""
        return sum(part.on_chip(shard) for part in self.components)

    def activation_bytes(
        self,
        tokens: float,
        sequence_length: int,
        precision_bytes: int,
        recompute: Recompute = "none",
        shard: Sharding = UNSHARDED,
    ) -> float:
        """Return the bytes saved per micro-batch of `tokens` tokens; `full` saves only the layer's input."""
        if recompute == "full":
            return tokens * self.hidden_size * precision_bytes / (shard.tp if shard.sp else 1)
        return sum(
            part.activation_bytes(tokens, sequence_length, precision_bytes, recompute, shard)
            for part in self.components
        )

    def kv_cache_bytes_per_token(self, precision_bytes: int, *, tp: int = 1) -> float:
        """Return the KV-cache bytes of one token (MLA: of the latent, replicated on every chip)."""
        core = self.attention.core
        kv_heads = max((w.max_pieces for w in self.attention.weights if w.name == "k"), default=1)
        return self.attention.kv_width * precision_bytes / min(tp, kv_heads) if core else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelProfile:
    """A decoder-only transformer by layers; equal layers are one object.

    With `tied_embeddings` the head has no weights; in a pipeline the last stage holds a copy of the
    embedding. `position_width` is the number of elements that the rotary embedding saves per position of a
    sequence. `stack` is the framework whose saved tensors the components have, `narrow_bytes` the bytes
    of an element of its products if they are narrower than 16 bits, else 0.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    embedding: Component
    layers: tuple[LayerProfile, ...]
    final_norm: Component
    head: Component
    tied_embeddings: bool
    position_width: int
    stack: Stack = field(default_factory=lambda: find_stack("isthmus"))
    narrow_bytes: float = 0.0

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied embedding counts once."""
        return sum(part.parameters for part in self._parts())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses; the whole embedding counts, although a token reads one row."""
        return sum(part.active_parameters for part in self._parts())

    def forward_flops(self, sequence_length: int, num_tokens: float) -> float:
        """Return the operations of a forward pass of the whole model."""
        return sum(part.forward_flops(sequence_length, num_tokens) for part in self._parts())

    def backward_flops(self, sequence_length: int, num_tokens: float, recompute: Recompute = "none") -> float:
        """Return the operations of the backward pass; embedding, final norm and head are not recomputed."""
        layers = sum(layer.backward_flops(sequence_length, num_tokens, recompute) for layer in self.layers)
        ends = (self.embedding, self.final_norm, self.head)
        return layers + sum(part.backward_flops(sequence_length, num_tokens) for part in ends)

    def boundary_bytes(self, tokens: float, precision_bytes: int) -> float:
        """Return the bytes of `tokens` tokens between stages: hidden states (backward: their gradients)."""
        return tokens * self.hidden_size * precision_bytes

    def loss_chunk_tokens(self, tokens: float, tp: int) -> float | None:
        """Return the tokens of a chunk of the loss on one of `tp` chips; None if it computes all `tokens` together.

        A stack whose loss has `chunk_bytes` computes head and loss by chunks once the fp32 logits of a micro-batch
        exceed them: no logit stays until the backward pass, which computes those of a chunk again.
        """
        chunk_bytes = self.stack.loss.chunk_bytes
        if chunk_bytes is None:
            return None
        most = max(chunk_bytes // (_FP32_BYTES * -(-self.vocab_size // tp)), 1)
        return most if tokens > most else None

    def head_kept_bytes(self, sizes: tuple[float, int, int], shard: Sharding) -> float:
        """Return the bytes that head and loss keep; `sizes` are tokens, sequence length and bytes per element."""
        kept = self.head.activation_bytes(*sizes, shard=shard)
        if self.loss_chunk_tokens(sizes[0], shard.tp) is None:
            return kept
        logits = sum(one.num_bytes(*sizes, shard) for one in self.head.saved if one.name == "log_probabilities")
        return kept - logits + _FP32_BYTES * sizes[0]  # the normaliser of each token

    def kv_cache_bytes_per_token(self, precision_bytes: int, *, tp: int = 1) -> float:
        """Return the KV-cache bytes of one token over all layers, on one of `tp` chips."""
        return sum(layer.kv_cache_bytes_per_token(precision_bytes, tp=tp) for layer in self.layers)

    def _parts(self) -> Iterable[Component | LayerProfile]:
        return (self.embedding, *self.layers, self.final_norm, self.head)
