"""`Chip`: an accelerator model, and the catalogue of chips with published data sheets."""

from __future__ import annotations

import itertools
from functools import cache
from importlib import resources
from typing import Annotated, Literal

import yaml
from pydantic import Field, model_validator

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, PositiveFloat, PositiveInt
from isthmus.core.units import Bytes

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8"]

NARROW_PRECISIONS: frozenset[str] = frozenset(("fp8", "mxfp8", "nvfp4", "int8"))
"""Precisions of at most 8 bits, which products alone use: attention, norms and the head keep 16 bits."""


NARROW_BYTES: dict[str, float] = {"fp8": 1.0, "int8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of an element of a narrow precision with its scales: MXFP8 has one of 8 bits for 32 elements (Open Compute
Project, Microscaling Formats Specification 1.0), NVFP4 one of 8 bits for 16 (NVIDIA, Transformer Engine)."""


class InNodeLink(FrozenModel):
    """The interconnect between the chips of a node; bandwidth is per chip and direction."""

    name: str
    bandwidth_bytes_per_s: PositiveFloat


_RATED_TOKENS, _RATED_HEAD = 8192, 128
"""Tokens of a causal sequence and size of a head at which the rates of attention kernels are stated."""


class AttentionRate(FrozenModel):
    """What an attention kernel reaches with causal sequences of 8,192 tokens and heads of 128.

    Rates are in operations of the causal half. With sequences of `half_rate_tokens` the kernel reaches half of what it
    reaches with endless ones: blocks on the diagonal are computed in full, and chips wait for the last block.
    `head_ratios` are the rates with heads of other sizes over that with heads of 128.
    """

    kernel: Literal["flash2", "flash3", "cudnn", "sdpa"]
    forward_flop_per_s: PositiveFloat
    backward_flop_per_s: PositiveFloat
    half_rate_tokens: NonNegativeFloat = 0.0
    head_ratios: dict[PositiveInt, PositiveFloat] = Field(default_factory=dict)
    source: Annotated[str, Field(min_length=1)]

    def time_factor(self, keys_per_query: float, elements_per_head: float) -> float:
        """Return the time of an operation over that at the stated rates, of queries with this many keys."""
        length, wasted = max(2 * keys_per_query, 1.0), self.half_rate_tokens
        return (1 + wasted / length) / (1 + wasted / _RATED_TOKENS) / self._head_ratio(elements_per_head)

    def _head_ratio(self, elements_per_head: float) -> float:
        """Return the rate with heads of this size over that with heads of 128, linear between known sizes."""
        known = sorted({_RATED_HEAD: 1.0, **self.head_ratios}.items())
        for (small, first), (large, last) in itertools.pairwise(known):
            if small <= elements_per_head <= large:
                return first + (last - first) * (elements_per_head - small) / (large - small)
        return known[0][1] if elements_per_head < known[0][0] else known[-1][1]


class SustainedRates(FrozenModel):
    """What public micro-benchmarks of a chip reached: large products, attention kernels, links; each has its source.

    `memory_latency_s` is that of one dependent read of the chip's memory, `small_all_reduce_s` the time of an
    all-reduce of 32 KiB over the eight chips of a node, `host_bytes_per_s` the slower of copies to and from pinned
    memory of the host.
    """

    matmul_flop_per_s: dict[Precision, PositiveFloat] = Field(default_factory=dict)
    attention: tuple[AttentionRate, ...] = ()
    link_bytes_per_s: PositiveFloat | None = None
    network_share: Annotated[float, Field(gt=0, le=1)] | None = None
    memory_latency_s: PositiveFloat | None = None
    small_all_reduce_s: PositiveFloat | None = None
    host_bytes_per_s: PositiveFloat | None = None
    sources: dict[str, str]

    @model_validator(mode="after")
    def _check_sources(self) -> SustainedRates:
        cited = type(self).model_fields.keys() - {"attention", "sources"}  # an attention rate names its own
        given = sorted(key for key in cited if getattr(self, key))
        if unnamed := [key for key in given if not self.sources.get(key)]:
            raise ValueError(f"no source for {', '.join(unnamed)}; add them to `sources`")
        return self

    def matmul_ratio(self, precision: Precision, chip: Chip) -> float:
        """Return the share of the peak that products reach in `precision` over that in bf16; 1 if one is unknown."""
        known = self.matmul_flop_per_s
        if precision not in known or "bf16" not in known:
            return 1.0
        return known[precision] / chip.flop_per_s(precision) / (known["bf16"] / chip.flop_per_s("bf16"))

    def attention_rate(self, kernel: str) -> AttentionRate | None:
        """Return the rates of an attention kernel, None if they are not known."""
        return next((one for one in self.attention if one.kernel == kernel), None)


DEFAULT_IDLE_SHARE = 0.2
"""Idle over rated power of a chip that states none; the mean of the catalogue's six readings is 0.19."""


class Chip(FrozenModel):
    """One device as a training framework sees it: the unit of scheduling and reservation.

    `peak_flop_per_s` maps a precision to the dense (not sparse) peak in operations per second;
    `reported_bytes` is the capacity that the device reports, `memory_bytes` that of the data sheet.
    `chips_per_card` is 2 if one card carries two such devices (throughput per card then counts both). `sustained` are
    rates that micro-benchmarks reached; without them the shares of the peak are defaults with a wide band. `power_w` is
    drawn while the chip computes, `idle_power_w` while it waits.
    """

    name: Name
    vendor: str = "unknown"
    peak_flop_per_s: dict[Precision, PositiveFloat]
    memory_bytes: Bytes
    reported_bytes: Bytes | None = None
    memory_bandwidth_bytes_per_s: PositiveFloat
    in_node_link: InNodeLink
    collective_library: str = "gloo"
    chips_per_card: PositiveInt = 1
    power_w: NonNegativeFloat = 0
    idle_power_w: NonNegativeFloat | None = None
    idle_power_source: str = ""
    sustained: SustainedRates | None = None
    source: str = "user"

    @model_validator(mode="after")
    def _check_idle_power(self) -> Chip:
        if self.idle_power_w is None:
            return self
        if self.idle_power_w > self.power_w:
            raise ValueError(f"idle_power_w {self.idle_power_w:g} is above power_w {self.power_w:g}")
        if not self.idle_power_source:
            raise ValueError("idle_power_w without idle_power_source: name where the figure comes from")
        return self

    @property
    def waiting_power_w(self) -> float:
        """The power while the chip waits: `idle_power_w`, or a usual share of `power_w`."""
        return DEFAULT_IDLE_SHARE * self.power_w if self.idle_power_w is None else self.idle_power_w

    def flop_per_s(self, precision: Precision) -> float:
        """Return the peak at `precision`, or at the nearest wider format that the chip supports."""
        wider: dict[str, tuple[Precision, ...]] = {
            "fp8": ("fp8", "fp16", "bf16", "tf32", "fp32"),
            "mxfp8": ("mxfp8", "fp8", "fp16", "bf16", "tf32", "fp32"),
            "nvfp4": ("nvfp4", "mxfp8", "fp8", "fp16", "bf16", "tf32", "fp32"),
            "int8": ("int8", "fp16", "bf16", "fp32"),
            "fp16": ("fp16", "bf16", "tf32", "fp32"),
            "bf16": ("bf16", "fp16", "tf32", "fp32"),
            "tf32": ("tf32", "fp32", "fp64"),
            "fp32": ("fp32", "fp64", "tf32", "bf16"),
            "fp64": ("fp64", "fp32"),
        }
        for candidate in wider[precision]:
            if candidate in self.peak_flop_per_s:
                return self.peak_flop_per_s[candidate]
        return max(self.peak_flop_per_s.values())


@cache
def chip_catalogue() -> dict[str, Chip]:
    """Return the built-in chips by name; `chips.yaml` cites the data sheet of each."""
    text = resources.files("isthmus.core").joinpath("chips.yaml").read_text(encoding="utf-8")
    return {name: Chip(name=name, **fields) for name, fields in yaml.safe_load(text).items()}
