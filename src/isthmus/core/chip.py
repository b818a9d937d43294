"""`Chip`: an accelerator model, and the catalogue of chips with published data sheets."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal

import yaml

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, PositiveFloat, PositiveInt
from isthmus.core.units import Bytes

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"]


class InNodeLink(FrozenModel):
    """The interconnect between the chips of a node; bandwidth is per chip and direction."""

    name: str
    bandwidth_bytes_per_s: PositiveFloat


class Chip(FrozenModel):
    """One device as a training framework sees it: the unit of scheduling and reservation.

    `peak_flop_per_s` maps a precision to the dense (not sparse) peak in operations per second;
    `chips_per_card` is 2 if one card carries two such devices (throughput per card then counts both).
    """

    name: Name
    vendor: str = "unknown"
    peak_flop_per_s: dict[Precision, PositiveFloat]
    memory_bytes: Bytes
    memory_bandwidth_bytes_per_s: PositiveFloat
    in_node_link: InNodeLink
    collective_library: str = "gloo"
    chips_per_card: PositiveInt = 1
    power_w: NonNegativeFloat = 0
    source: str = "user"

    def flop_per_s(self, precision: Precision) -> float:
        """Return the peak at `precision`, or at the nearest wider format that the chip supports."""
        wider: dict[str, tuple[Precision, ...]] = {
            "fp8": ("fp8", "fp16", "bf16", "tf32", "fp32"),
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
