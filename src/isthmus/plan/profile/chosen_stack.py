"""`chosen_stack`: a plan's stack, changed by the kernels and formats that the plan names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from isthmus.core.chip import Precision
from isthmus.core.plan import Plan
from isthmus.core.plan_parts.kernel_choice import KernelChoice
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.core.stack import (
    AddedTensor,
    LossMemory,
    RowScaledProducts,
    Stack,
    StackState,
    TensorRule,
    TrafficRule,
    find_stack,
)

_NORMS = "one kernel (Transformer Engine, Apex): the input in its own precision and its statistics are kept"
_COMPILED = "torch.compile fuses element-wise work with its neighbours, and the backward pass computes it again"
_FUSED_LOSS = "P. Hsu et al., Liger Kernel, 2024, 3.2: the gradient replaces the logits in place; moved bytes counted"
_LINEAR_LOSS = "P. Hsu et al., Liger Kernel, 2024, 3.2: chunks of tokens, as many as vocabulary over hidden size"
_DROPOUT = "V. Korthikanti et al., MLSys 2023, section 4: a mask of one byte an element; of the scores also the result"
_WIDE_SCORES = "the softmax keeps its result in the compute precision"
_MASKS = (
    ("hidden.mask_0", "projection.input"), ("hidden.mask_1", "feed_forward.input"), ("scores.mask", "scores.softmax"),
)  # fmt: skip
"""Masks of dropout, and saved tensors of the same size."""
_EIGHT_BITS = "formats.activations of the plan; the output of attention is kept by its own kernel as well"
_PRODUCT_INPUTS = ("projection.input", "feed_forward.input", "down.input", "dispatch", "o.input")


def chosen_stack(plan: Plan, hidden_size: int = 1, vocab_size: int = 1) -> Stack:
    """Return the stack of `plan` with its kernels and formats; sizes are needed for a `linear` loss alone.

    Raises `InputError` for an unknown stack.
    """
    stack = find_stack(plan.stack)
    if plan.kernels is None and plan.formats is None:
        return stack
    chunks = -(-vocab_size // hidden_size)
    return _changed(stack, plan.kernels or KernelChoice(), plan.formats or TensorFormats(), plan.precision, chunks)


@lru_cache(maxsize=256)
def _changed(
    stack: Stack, kernels: KernelChoice, formats: TensorFormats, precision: Precision | None, chunks: int
) -> Stack:
    each = 4 if precision in ("fp32", "tf32") else 2
    rules, loss = list(stack.tensors), stack.loss
    if kernels.norms == "fused" or kernels.compiled:
        rules += [
            TensorRule(tensors="*norm*.input", element_bytes=each, source=_NORMS),
            TensorRule(tensors="*norm*.scaled", kept=0.0, source=_NORMS),
            TensorRule(tensors="*norm.gradients", element_bytes=each, source=_NORMS),
        ]
    if kernels.compiled:
        rules.append(TensorRule(tensors="activation", kept=0.0, source=_COMPILED))
    if kernels.loss == "fused":
        rules.append(TensorRule(tensors="log_probabilities", element_bytes=each, source=_FUSED_LOSS))
        loss = LossMemory(peak_bytes=0, forward_bytes=3 * each, backward_bytes=2 * each, source=_FUSED_LOSS)
    if kernels.loss == "linear":
        rules.append(TensorRule(tensors="log_probabilities", kept=0.0, source=_LINEAR_LOSS))
        loss = LossMemory(
            peak_bytes=each, forward_bytes=3 * each, backward_bytes=2 * each, chunks=chunks, source=_LINEAR_LOSS
        )
    if formats.activations == "fp8":
        rules += [TensorRule(tensors=name, element_bytes=1, source=_EIGHT_BITS) for name in _PRODUCT_INPUTS]
    rules += _score_rules(kernels, each)
    changes: dict[str, object] = {"tensors": tuple(rules), "loss": loss}
    if kernels.dropout:
        changes |= _with_masks(stack)
    if formats.gathers == "fp8":
        changes["gathered"] = stack.gathered.model_copy(update={"element_bytes": 1.0})
    if kernels.attention is not None:
        changes["attention_kernel"] = "any" if kernels.attention == "eager" else kernels.attention
    if formats.gradients == "bf16" and stack.gradients_as_reduced:
        changes["state"] = _narrow_gradients(stack.state)
    if formats.scales == "row" and stack.row_scaled is not None:
        changes |= _with_row_scales(stack, stack.row_scaled)
    return stack.model_copy(update=changes)


def _score_rules(kernels: KernelChoice, each: int) -> Iterator[TensorRule]:
    """Yield what a stack keeps otherwise of scores in memory: in fp32, and with dropout, whose result is another."""
    if kernels.attention == "eager" and each == 4:
        yield TensorRule(tensors="scores.softmax", element_bytes=4, source=_WIDE_SCORES)
    if kernels.dropout:
        yield TensorRule(tensors="scores.probabilities", source=_DROPOUT)


def _with_masks(stack: Stack) -> dict[str, object]:
    """Return what dropout adds to a stack: masks, and their bytes where it counts element-wise work by operator."""
    masks = tuple(AddedTensor(name=name, like=like, element_bytes=1, source=_DROPOUT) for name, like in _MASKS)
    changes: dict[str, object] = {"added": (*stack.added, *masks)}
    if any(rule.when == "always" for rule in stack.traffic):
        rule = TrafficRule(tensors="*.mask*", forward_bytes=1, backward_bytes=1, when="added", source=_DROPOUT)
        changes["traffic"] = (*stack.traffic, rule)
    return changes


def _with_row_scales(stack: Stack, rows: RowScaledProducts) -> dict[str, object]:
    """Return what changes of a stack whose products of 8 bits have a scale for each row."""
    kept = tuple(rule for rule in stack.traffic if rule.when != "fp8")
    exchanges = {"narrow_gathers": rows.narrow_gathers, "overlaps_gathers": rows.overlaps_gathers}
    return {"traffic": (*kept, *rows.traffic), "exchanges": stack.exchanges.model_copy(update=exchanges)}


def _narrow_gradients(state: StackState) -> StackState:
    """Return the state with gradients of two bytes, where they have four."""
    kinds = {name: kind for name in ("bf16", "fp32", "fp8") if (kind := getattr(state, name)) is not None}
    return state.model_copy(
        update={name: one.model_copy(update={"gradients": min(2.0, one.gradients)}) for name, one in kinds.items()}
    )
