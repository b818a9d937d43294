"""`Stack`: a training framework as the planner sees it: what it keeps in memory, fuses, overlaps and recomputes.

Built-in stacks are the YAML files of `isthmus.core.stacks`; `docs/design/memory-model.md` explains the terms.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field, model_validator

from isthmus.core.base_model import Fraction, FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat
from isthmus.core.errors import InputError

StatePrecision = Literal["bf16", "fp32", "fp8"]
Source = Annotated[str, Field(min_length=1)]

DEFAULT_STACK = "isthmus"
"""The stack of this project's runtime: exactly the tensors of the model classes."""


class StateBytes(FrozenModel):
    """Bytes per parameter that a chip keeps, before sharding: weights, gradients, optimizer."""

    weights: PositiveFloat
    gradients: NonNegativeFloat
    optimizer: NonNegativeFloat


class StackState(FrozenModel):
    """The state by precision. Without an entry for `fp8`, that of `bf16` counts."""

    bf16: StateBytes
    fp32: StateBytes
    fp8: StateBytes | None = None
    source: Source

    def of(self, precision: StatePrecision, narrow_bytes: float = 1.0) -> StateBytes:
        """Return the bytes per parameter with this compute precision.

        The 8-bit copies that `fp8` has beside the weights of `bf16` take `narrow_bytes` an element instead of one.
        """
        if precision == "fp32":
            return self.fp32
        if precision == "bf16" or self.fp8 is None:
            return self.bf16
        copies = max(0.0, self.fp8.weights - self.bf16.weights)
        return self.fp8.model_copy(update={"weights": self.fp8.weights + copies * (narrow_bytes - 1.0)})


class TensorRule(FrozenModel):
    """What differs from autograd's list for the tensors whose names match `tensors` (`*` matches anything).

    `kept` is the share that the forward pass keeps, `selective` the share of this that selective recomputation
    keeps (default: as the model class says); bytes are per element (default: as the model class says).
    """

    tensors: str
    kept: Fraction = 1.0
    selective: Fraction | None = None
    element_bytes: PositiveFloat | None = None
    fp8_bytes: PositiveFloat | None = None
    source: Source


class AddedTensor(FrozenModel):
    """A tensor that the stack keeps in addition, `times` as wide as the tensor named `like`, sharded alike.

    `when` limits it to products of 8 bits (`fp8`) or to selective recomputation (`selective`).
    """

    name: str
    like: str
    times: PositiveFloat = 1.0
    element_bytes: PositiveFloat | None = None
    when: Literal["always", "fp8", "selective"] = "always"
    source: Source


class TrafficRule(FrozenModel):
    """Bytes that kernels of their own move per element of the tensors whose names match `tensors`, in both passes.

    A rule for `always` counts element-wise work by operator: a stack with one moves what its rules say, in place of
    twice the bytes that it keeps. A rule for `fp8` is added with products of 8 bits: casts of what they multiply; one
    with `added` always: passes over tensors that the kept ones do not show. A rule for a `gathered` tensor counts the
    tokens of all chips of tensor parallelism, which sequence parallelism divides otherwise. `weights` are those of the
    products that a chip computes, whole where a pass has gathered them.
    """

    tensors: str
    forward_bytes: NonNegativeFloat = 0.0
    backward_bytes: NonNegativeFloat = 0.0
    when: Literal["always", "added", "fp8"] = "always"
    gathered: bool = False
    source: Source


class SelectiveRecompute(FrozenModel):
    """What selective recomputation repeats: the products of these weights, the attention core or not.

    `traffic_share` is the part of the forward pass's element-wise traffic that it repeats, `num_tp_exchanges` how many
    all-reduces of a layer (two gathers are one).
    """

    weights: tuple[str, ...] = ()
    attention: bool = True
    traffic_share: Fraction = 0.5
    num_tp_exchanges: NonNegativeFloat = 0.0
    source: Source


class TensorParallelExchanges(FrozenModel):
    """How a stack exchanges tensors of tensor and context parallelism, where a plan says nothing.

    With `hides_backward` the exchanges of the backward pass run beside weight gradients, but with `gathers_before` and
    sequence parallelism not the gathers that its products wait for, half of them. Exchanges that a plan overlaps
    with products do so in the backward pass too with `overlaps_backward`; without `overlaps_gathers` only their
    scatters do. With `narrow_gathers` products of 8 bits gather their inputs in 8 bits (they are scattered in 16). With
    `expands_keys` keys and values are repeated for every query head before chips that share a sequence exchange them.
    With `keeps_gathered` products keep the inputs that sequence parallelism gathered, of all tokens, for the backward
    pass, where other stacks gather them again.
    Where they merge the attention of a block at a time with kernels of their own, these move `merge_forward_bytes` and
    `merge_backward_bytes` per element of the result for each block that another chip sent.
    """

    hides_backward: bool = True
    gathers_before: bool = False
    overlaps_backward: bool = True
    overlaps_gathers: bool = True
    narrow_gathers: bool = False
    expands_keys: bool = False
    keeps_gathered: bool = False
    merge_forward_bytes: NonNegativeFloat = 0.0
    merge_backward_bytes: NonNegativeFloat = 0.0
    source: Source


class RowScaledProducts(FrozenModel):
    """What differs with `formats.scales: row`, in products of 8 bits whose operands have a scale for each row.

    `traffic` replaces the stack's rules for `fp8`; the others replace those of the stack's `exchanges`.
    """

    traffic: tuple[TrafficRule, ...]
    narrow_gathers: bool = False
    overlaps_gathers: bool = True
    source: Source


class LossMemory(FrozenModel):
    """The loss: bytes per logit at the peak beside the kept ones, and bytes moved forward and backward.

    `chunks` is the number of parts that a chunked loss computes one after another. With `chunk_bytes` it has parts only
    where the fp32 logits exceed them: of at most these bytes, computed again in the backward pass. `stranded_bytes`
    per logit lie at the peak in holes between tensors that are too large for them: reserved, not allocated. Fields that
    begin with `sharded_` hold for a vocabulary that tensor parallelism divides (default: those without).
    """

    peak_bytes: NonNegativeFloat | None = None
    stranded_bytes: NonNegativeFloat = 0.0
    sharded_peak_bytes: NonNegativeFloat | None = None
    sharded_stranded_bytes: NonNegativeFloat | None = None
    forward_bytes: PositiveFloat
    backward_bytes: PositiveFloat
    chunks: Annotated[int, Field(ge=1)] = 1
    chunk_bytes: PositiveFloat | None = None
    source: Source

    def peak_of(self, tp: int) -> float | None:
        """Return the bytes per logit at the peak beside the kept ones, for a vocabulary divided by `tp`."""
        return self.peak_bytes if tp == 1 or self.sharded_peak_bytes is None else self.sharded_peak_bytes

    def stranded_of(self, tp: int) -> float:
        """Return the bytes per logit that are reserved at the peak in holes, for a vocabulary divided by `tp`."""
        sharded = self.sharded_stranded_bytes
        return self.stranded_bytes if tp == 1 or sharded is None else sharded


class GatheredWeights(FrozenModel):
    """Weights that ZeRO 3 (FSDP) has gathered at a time: `layers` of them, or with a pipeline all of the stage.

    `element_bytes` (default: of the compute precision) are of a gathered weight, `gradient_bytes` of a gradient of one
    layer before it is reduced, `pipeline_gradient_bytes` of the gradients of all of a stage of a pipeline, which are
    added up over micro-batches before they are reduced. With `ends`, embedding and head stay gathered; with
    `ends_in_turn` each is gathered for its use, as a layer is. A pass that gathers weights copies them between buffers:
    `forward_copy_bytes` and `backward_copy_bytes` of memory traffic per parameter, the second with the copies of
    gradients.
    """

    layers: NonNegativeInt = 1
    whole_stage_with_pipeline: bool = False
    ends: bool = False
    ends_in_turn: bool = False
    element_bytes: PositiveFloat | None = None
    gradient_bytes: NonNegativeFloat = 0.0
    pipeline_gradient_bytes: NonNegativeFloat = 0.0
    forward_copy_bytes: NonNegativeFloat = 0.0
    backward_copy_bytes: NonNegativeFloat = 0.0
    source: Source


class AllocatorShares(FrozenModel):
    """What the allocator reserves beyond the bytes in use, as a share of them.

    `usual_share` is what it has reserved at the end. When memory runs out it gives blocks back, and `least_share`
    remains lost: that decides whether a plan fits.
    """

    usual_share: Fraction
    least_share: Fraction
    source: Source


class OutsideMemory(FrozenModel):
    """Memory of the chip that the framework's allocator does not own.

    The sum of a share of the chip, the context of the process (and libraries), and the buffers of each group of chips
    with a collective of its own (tensor, pipeline, context, expert, data).
    """

    share: Fraction = 0.0
    context_bytes: NonNegativeFloat = 0.0
    group_bytes: NonNegativeFloat = 0.0
    source: Source


DEFAULT_EXCHANGES = TensorParallelExchanges(source="Megatron-LM, core/tensor_parallel/layers.py")
"""Exchanges of a stack that names none."""


class Stack(FrozenModel):
    """A training framework, its version, and what it does with memory and time; see `docs/design/memory-model.md`.

    With `gradients_as_reduced` the buffer of gradients has the format in which they are reduced.
    `expert_launch_ratio` is the host's time for the forward products of one expert over that for the launches of a
    dense layer, where they are launched expert by expert.
    """

    name: Name
    version: str
    state: StackState
    tensors: tuple[TensorRule, ...] = ()
    added: tuple[AddedTensor, ...] = ()
    selective: SelectiveRecompute
    loss: LossMemory
    gathered: GatheredWeights
    fused_weight_gradients: bool = False
    keeps_stage_tensors: bool = True
    buffer_bytes: NonNegativeFloat = 0.0
    allocator: AllocatorShares
    outside: OutsideMemory
    attention_kernel: Literal["any", "flash2", "flash3", "cudnn", "sdpa"] = "any"
    traffic_ratio: PositiveFloat = 1.0
    traffic: tuple[TrafficRule, ...] = ()
    row_scaled: RowScaledProducts | None = None
    expert_launch_ratio: NonNegativeFloat = 0.0
    exchanges: TensorParallelExchanges = DEFAULT_EXCHANGES
    overlap_gradients: bool = False
    gradients_as_reduced: bool = False
    sources: dict[str, Source] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    @model_validator(mode="after")
    def _check_sources(self) -> Stack:
        """Raise unless each number beside the parts, which name their own, has a source."""
        defaults = {"buffer_bytes": 0.0, "traffic_ratio": 1.0, "expert_launch_ratio": 0.0}
        unnamed = [key for key, none in defaults.items() if getattr(self, key) != none and key not in self.sources]
        if unnamed:
            raise ValueError(f"no source for {', '.join(unnamed)}; add them to `sources`")
        return self


def _check_stack_name(name: str) -> str:
    """Return `name` if it is a built-in stack; raise `ValueError` otherwise."""
    if name not in stack_names():
        raise ValueError(
            f"unknown stack '{name}'; known: {', '.join(stack_names())}, or the path of an own file (*.yaml)"
        )
    return name


StackChoice = Annotated[str, AfterValidator(_check_stack_name)] | Stack
"""A built-in stack by name, or a whole one (the readers of plan and job files replace a path by its content)."""


@cache
def stack_names() -> tuple[str, ...]:
    """Return the names of the built-in stacks, sorted."""
    files = resources.files("isthmus.core").joinpath("stacks").iterdir()
    return tuple(sorted(one.name.removesuffix(".yaml") for one in files if one.name.endswith(".yaml")))


@cache
def _built_in(name: str) -> Stack:
    text = resources.files("isthmus.core").joinpath("stacks", f"{name}.yaml").read_text(encoding="utf-8")
    return Stack.model_validate(yaml.safe_load(text))


def find_stack(choice: str | Stack) -> Stack:
    """Return the stack of a choice; raise `InputError` for an unknown name."""
    if isinstance(choice, Stack):
        return choice
    if choice not in stack_names():
        raise InputError(f"unknown stack '{choice}'", hint=f"one of {', '.join(stack_names())}, or a path of a file")
    return _built_in(choice)


def is_stack_file(choice: object) -> bool:
    """Return whether a choice of a stack is the path of a file."""
    return isinstance(choice, str) and choice.endswith((".yaml", ".yml"))
