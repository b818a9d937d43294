"""`adapted_profile`: a model's profile with low-rank adapters beside frozen weights.

A frozen product keeps no input, unless an adapter beside it needs it; a frozen norm keeps no scaled input. Each adapter
adds its two factors and the result of the first, `rank` elements a token. Dropout of adapters is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from isthmus.core.plan_parts.low_rank_adapters import LowRankAdapters
from isthmus.plan.profile.component import Component, SavedTensor, Weight, input_width
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile

_INPUT_OF = {
    "projection.input": ("q", "k", "v"),
    "o.input": ("o",),
    "o.input_fp8": ("o",),
    "feed_forward.input": ("gate", "up"),
    "down.input": ("down",),
    "head.input": (),
}
"""Saved inputs of products by the products that need them for their weight gradients."""

_SPLIT_BY_INPUT = ("o", "down")
"""Products whose input tensor parallelism shards; the others' output."""


@lru_cache(maxsize=64)
def adapted_profile(profile: ModelProfile, adapters: LowRankAdapters) -> ModelProfile:
    """Return `profile`, stacked or not, with `adapters` beside its frozen weights; routed experts take none."""
    layers = {id(layer): _layer(layer, adapters) for layer in profile.layers}
    return replace(
        profile,
        embedding=_frozen(profile.embedding, ()),
        layers=tuple(layers[id(layer)] for layer in profile.layers),
        final_norm=_frozen(profile.final_norm, ()),
        head=_frozen(profile.head, ()),
    )


def _layer(layer: LayerProfile, adapters: LowRankAdapters) -> LayerProfile:
    return replace(
        layer,
        attention=_adapted(layer.attention, adapters),
        feed_forward=_adapted(layer.feed_forward, adapters),
        norms=_adapted(layer.norms, adapters),
    )


def _adapted(part: Component, adapters: LowRankAdapters) -> Component:
    own = [one for one in part.weights if one.name in adapters.targets and one.matrix_elements and not one.expert]
    frozen = _frozen(part, tuple(one.name for one in own))
    if not own:
        return frozen
    narrow = SavedTensor(name="lora.hidden", width=adapters.rank * len(own))
    factors = tuple(factor for one in own for factor in _factors(part, one, adapters.rank))
    return replace(frozen, weights=(*frozen.weights, *factors), saved=(*frozen.saved, narrow))


def _factors(part: Component, weight: Weight, rank: int) -> Iterator[Weight]:
    """Yield the two factors of an adapter: from the product's input to `rank`, and on to its output."""
    inner, outer = _widths(part, weight)
    by_rows = weight.name in _SPLIT_BY_INPUT
    pieces = (weight.max_pieces, 1) if by_rows else (1, weight.max_pieces)
    yield Weight(name=f"lora_a.{weight.name}", matrix_elements=inner * rank, max_pieces=pieces[0])
    yield Weight(name=f"lora_b.{weight.name}", matrix_elements=rank * outer, max_pieces=pieces[1])


def _widths(part: Component, weight: Weight) -> tuple[int, int]:
    """Return the elements of a product's input and output."""
    wide = int(input_width(part))
    other = weight.matrix_elements // wide
    return (other, wide) if weight.name in _SPLIT_BY_INPUT else (wide, other)


def _frozen(part: Component, adapted: tuple[str, ...]) -> Component:
    return replace(
        part,
        weights=tuple(replace(one, trainable=False) for one in part.weights),
        saved=tuple(one for one in part.saved if _is_kept(one, part, adapted)),
        input_width=input_width(part),
    )


def _is_kept(tensor: SavedTensor, part: Component, adapted: tuple[str, ...]) -> bool:
    if fnmatchcase(tensor.name, "*norm*.scaled") or tensor.name == "token_ids":
        return False
    needed = _INPUT_OF.get(tensor.name)
    if needed is None or (part.kind == "experts" and tensor.name == "feed_forward.input"):
        return True
    return any(name in adapted for name in needed)
