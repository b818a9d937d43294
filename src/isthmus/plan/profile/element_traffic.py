"""`element_traffic`: the bytes that the element-wise kernels of a layer move on one chip, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from isthmus.core.stack import TrafficRule
from isthmus.plan.profile.component import Component, Sharding
from isthmus.plan.profile.layer_profile import LayerProfile

WEIGHTS = "weights"
"""Stands in a rule for the weights of products, as many as a chip holds in a pass."""


def element_traffic(
    layer: LayerProfile, sizes: tuple[float, int, int], shard: Sharding, kept_bytes: float
) -> tuple[float, float]:
    """Return the bytes moved by the forward and the backward pass of `layer`, without residual additions.

    `sizes` are the tokens of a chip's micro-batch, its sequence length and the bytes of a compute element.

    Rules of the stack for `always` count them by operator; without one the forward pass moves `kept_bytes`, what
    autograd keeps written and read once, and the backward pass twice as much. Other rules (casts, sorts) are added.
    """

    def moved(rules: Sequence[TrafficRule]) -> tuple[float, float]:
        each = [_moved(part, rule, shard, sizes) for rule in rules for part in layer.components]
        return sum(forward for forward, _ in each), sum(backward for _, backward in each)

    always = [rule for rule in layer.traffic if rule.when == "always"]
    forward, backward = moved(always) if always else (kept_bytes, 2 * kept_bytes)
    added, added_back = moved([rule for rule in layer.traffic if rule.when != "always"])
    return forward + added, backward + added_back


def _moved(part: Component, rule: TrafficRule, shard: Sharding, sizes: tuple[float, int, int]) -> tuple[float, float]:
    """Return the bytes that `rule` counts for the tensors of a component, forward and backward."""
    if rule.tensors == WEIGHTS:
        held = sum(weight.on_chip(shard) for weight in part.weights if weight.matrix_elements)
        return rule.forward_bytes * held, rule.backward_bytes * held
    matching = tuple(replace(one, element_bytes=1.0) for one in part.saved if fnmatchcase(one.name, rule.tensors))
    if not matching:
        return 0.0, 0.0
    taken = replace(shard, sp=False) if rule.gathered else shard
    elements = replace(part, saved=matching).activation_bytes(*sizes, shard=taken)
    return rule.forward_bytes * elements, rule.backward_bytes * elements
