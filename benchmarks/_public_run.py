"""`PublicRun`: one run of a public set, as an adapter reads it, and the pools and models that such sets use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from isthmus.core.chip import chip_catalogue
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan import profile_model
from isthmus.plan.profile.layer_profile import ModelProfile

_H100 = chip_catalogue()["H100"].sustained
_RATES = _H100.model_dump() if _H100 else None
_CAP = ((500.0 - 145.0) / (700.0 - 145.0)) ** (1 / 3)
"""Clock of an H100 limited to 500 W over one at its rated 700 W, 145 W of both without work: the power of a clock f is
that of f and a voltage in proportion to f, squared (dynamic power, C V^2 f)."""
_CAPPED_RATES = _RATES and {
    **_RATES, "matmul_flop_per_s": {kind: _CAP * rate for kind, rate in _RATES["matmul_flop_per_s"].items()},
}  # fmt: skip
CONFIGS = Path(__file__).parent.parent / "tests" / "plan" / "configs"
GIB = 2**30
MemoryKind = Literal["allocated", "reserved", "device"]

OWN_CHIPS = [
    {
        "name": "H100-HBM2e",
        "vendor": "NVIDIA",
        "peak_flop_per_s": {"fp32": 67.0e12, "tf32": 494.5e12, "bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979.0e12},
        "memory_bytes": "95 GiB",
        "memory_bandwidth_bytes_per_s": 2.4e12,
        "in_node_link": {"name": "NVLink4", "bandwidth_bytes_per_s": 450.0e9},
        "collective_library": "nccl",
        "power_w": 500,
        "sustained": _CAPPED_RATES,
        "source": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, Hardware (96 GB of HBM2e, 500 W); products "
        "as of the H100 at the clock of that power, 0.69 of the peak (pytorch/ao, torchao/testing/training/"
        "roofline_utils.py, has 0.6 and since March 2025 0.78 for this chip)",
    },
    {
        "name": "H800",
        "vendor": "NVIDIA",
        "peak_flop_per_s": {"fp32": 67.0e12, "tf32": 494.5e12, "bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979.0e12},
        "memory_bytes": "79.1 GiB",
        "memory_bandwidth_bytes_per_s": 3.35e12,
        "in_node_link": {"name": "NVLink4", "bandwidth_bytes_per_s": 200.0e9},
        "collective_library": "nccl",
        "power_w": 700,
        "sustained": _RATES and {**_RATES, "link_bytes_per_s": None},
        "source": "H100 SXM with NVLink at 400 GB/s",
    },
]
"""Chips of the sets that the catalogue lacks."""


@dataclass(frozen=True, kw_only=True)
class PublicRun:
    """One configuration of a public set and what was measured."""

    name: str
    kind: Literal["dense", "experts"]
    plan: Plan
    pool: Pool
    profile: ModelProfile
    measured_s: float | None
    """Seconds of an iteration; None for a configuration that ran out of memory."""
    memory_bytes: float | None = None
    memory_kind: MemoryKind = "device"

    @property
    def ran(self) -> bool:
        """Whether the configuration ran."""
        return self.measured_s is not None


@cache
def public_cluster(chip: str, chips: int, gbps: float, chips_per_node: int = 8) -> Pool:
    """Return a pool of one cluster of `chips`; `gbps` is the network rate of each chip."""
    group = {
        "name": "g", "chip": chip, "nodes": -(-chips // chips_per_node), "chips_per_node": chips_per_node,
        "network_gbps": gbps,
    }  # fmt: skip
    return Pool.model_validate({"clusters": [{"name": "c", "owner": "o", "node_groups": [group]}], "chips": OWN_CHIPS})


@cache
def public_model(config: str, *, tied: bool = False) -> ModelProfile:
    """Return the profile of a published `config.json`; `tied` as in runs that share embedding and head."""
    model = load_model(CONFIGS / f"{config}.json")
    if tied:
        model = model.model_copy(update={"config": {**model.config, "tie_word_embeddings": True}})
    return profile_model(model)


def table_rows(text: str) -> list[list[dict[str, str]]]:
    """Return the Markdown tables of a text, each as its rows by column."""
    tables: list[list[dict[str, str]]] = []
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            header = []
        elif not header:
            header = cells
            tables.append([])
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells) and len(cells) == len(header):
            tables[-1].append(dict(zip(header, cells, strict=True)))
    return tables


def number(text: Any) -> float | None:
    """Return the first number in a cell, commas removed; None if there is none."""
    found = re.search(r"\d[\d,]*\.?\d*", str(text))
    return float(found[0].replace(",", "")) if found else None
