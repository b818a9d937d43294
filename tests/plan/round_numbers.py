"""Links, chips and layers of round numbers, from which times can be derived by hand."""

from __future__ import annotations

from dataclasses import replace

from isthmus.core.chip import Chip, InNodeLink
from isthmus.plan.profile.component import AttentionCore, Component, SavedTensor, Weight
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.time.calibration import Calibration, ChipRates, FittedParameter
from isthmus.plan.time.collectives import Topology
from isthmus.plan.time.stage_time import ChipModel

UNIT = Topology(
    chips_per_node=4, link_bytes_per_s=8.0, link_latency_s=1.0, network_bytes_per_s=2.0, network_latency_s=10.0
)
"""Four chips a node: 1 s and 8 bytes a second inside, 10 s and 2 bytes a second between nodes."""

UNIT_CHIP = Chip(
    name="unit",
    peak_flop_per_s={"bf16": 1000.0, "fp8": 2000.0, "fp32": 500.0},
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=200.0,
    in_node_link=InNodeLink(name="link", bandwidth_bytes_per_s=16.0),
)

NO_HOST = {"launch_s": 1e-15, "skew_s": 1e-15}
"""A host that launches at once, and members of a collective that are never late."""


def calibration_of(**values: float) -> Calibration:
    """A calibration with these values, without uncertainty; `CHIP__name` stands for `CHIP/name`."""
    parameters = {key.replace("__", "/"): FittedParameter(value=value, relative=0.0) for key, value in values.items()}
    return Calibration(name="by-hand", source="tests", parameters=parameters)


def chip_model(chip: Chip = UNIT_CHIP, expert_topology: Topology | None = None, **values: float) -> ChipModel:
    """A chip that reaches half of its peak, a quarter in attention, half of its memory's rate; without launches.

    500 operations a second in products of bf16, 250 in attention, 100 bytes a second.
    """
    shares = {"matmul_share": 0.5, "attention_share": 0.25, "memory_share": 0.5}
    calibration = calibration_of(**(shares | NO_HOST | values))
    rates = ChipRates.of(calibration, chip.name)
    return ChipModel(
        chip=chip, rates=rates, topology=UNIT, calibration=calibration, expert_topology=expert_topology
    )  # fmt: skip


CORE = AttentionCore(num_heads=4, num_kv_heads=2, key_dim=2, value_dim=4)
"""Queries of 4 heads of 2, keys of 2 heads of 2, values of 2 heads of 4, results of 4 heads of 4."""

ATTENTION = Component(
    name="attention",
    kind="attention",
    weights=(
        Weight(name="q", matrix_elements=64, max_pieces=4),
        Weight(name="k", matrix_elements=32, max_pieces=2),
        Weight(name="v", matrix_elements=64, max_pieces=2),
        Weight(name="o", matrix_elements=128, max_pieces=4),
    ),
    saved=(SavedTensor(name="projection.input", width=8), SavedTensor(name="core.output", width=16, cut="tp")),
    core=CORE,
    kv_width=12,
)
DENSE = Component(
    name="feed_forward",
    kind="dense",
    weights=tuple(Weight(name=name, matrix_elements=256, max_pieces=32) for name in ("gate", "up", "down")),
    saved=(SavedTensor(name="feed_forward.input", width=8), SavedTensor(name="first.output", width=64, cut="tp")),
)
EXPERTS = Component(
    name="feed_forward",
    kind="experts",
    weights=(
        Weight(name="router", matrix_elements=32),
        *(
            Weight(name=name, matrix_elements=256, copies=4, active_copies=2, max_pieces=32, expert=True)
            for name in ("gate", "up", "down")
        ),
    ),
    saved=(SavedTensor(name="feed_forward.input", width=8), SavedTensor(name="dispatch", width=8, routed=True)),
    num_experts=4,
    experts_per_token=2,
)
NORMS = Component(
    name="norms",
    kind="norm",
    weights=(Weight(name="norm_1", vector_elements=8),),
    saved=(SavedTensor(name="norm_1.input", width=8),),
)
DENSE_LAYER = LayerProfile(hidden_size=8, attention=ATTENTION, feed_forward=DENSE, norms=NORMS)
EXPERT_LAYER = replace(DENSE_LAYER, feed_forward=EXPERTS)
"""A layer of hidden size 8 with one feed-forward part, or with 4 experts of which a token takes 2."""


def profile_of(*layers: LayerProfile, **fields: object) -> ModelProfile:
    """A model of these layers with a vocabulary of 16."""
    known: dict[str, object] = {
        "architecture": "hand",
        "hidden_size": 8,
        "vocab_size": 16,
        "embedding": Component(
            name="embedding", kind="embedding", weights=(Weight(name="table", vector_elements=128),)
        ),
        "final_norm": Component(name="final_norm", kind="norm"),
        "head": Component(
            name="head",
            kind="head",
            weights=(Weight(name="head", matrix_elements=128, max_pieces=16),),
            saved=(SavedTensor(name="head.input", width=8),),
        ),
        "tied_embeddings": False,
        "position_width": 0,
    }
    return ModelProfile(layers=layers, **(known | fields))  # type: ignore[arg-type]
