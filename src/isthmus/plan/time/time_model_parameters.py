"""The parameters of the time model, with their defaults and uncertainties.

All are physical: achieved shares of data-sheet rates, latencies, and host launch time. `relative` is the
standard deviation of the logarithm. The defaults describe large matrix products and NCCL on NVIDIA chips
since 2020; for other chips without calibration the uncertainties are wide.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A parameter's description, default and relative uncertainty (0: assumed, never fitted)."""

    description: str
    default: float
    relative: float


TIME_MODEL_PARAMETERS: dict[str, ParameterSpec] = {
    "matmul_share": ParameterSpec(
        description="share of the chip's peak FLOP/s reached by large matrix products",
        default=0.8,
        relative=0.15,
    ),
    "attention_share": ParameterSpec(
        description="share of the peak FLOP/s reached by the attention core", default=0.5, relative=0.4
    ),
    "narrow_factor": ParameterSpec(
        description="measured over modelled time of products of 8 bits or less: recipes of scaling differ",
        default=1.0,
        relative=0.1,
    ),
    "context_factor": ParameterSpec(
        description="measured over modelled time of the attention core of chips that share a sequence",
        default=1.0,
        relative=0.25,
    ),
    "memory_share": ParameterSpec(
        description="share of the memory bandwidth reached by element-wise operations",
        default=0.85,
        relative=0.15,
    ),
    "bias_factor": ParameterSpec(
        description="measured over modelled time of a pass that no other parameter explains: the model's bias",
        default=1.0,
        relative=0.1,
    ),
    "stack_factor": ParameterSpec(
        description="measured over modelled time of a pass of one training framework: what its stack leaves out",
        default=1.0,
        relative=0.05,
    ),
    "launch_s": ParameterSpec(
        description="seconds for the host to launch the forward pass of a layer", default=0.7e-3, relative=0.5
    ),
    "skew_s": ParameterSpec(
        description="seconds of host time per collective and additional member", default=20e-6, relative=1.0
    ),
    "link_share": ParameterSpec(
        description="share of the link rate inside a node reached by collectives", default=0.75, relative=0.15
    ),
    "link_latency_s": ParameterSpec(
        description="seconds to start a collective inside a node", default=35e-6, relative=0.3
    ),
    "network_share": ParameterSpec(
        description="share of the network rate between nodes reached by collectives",
        default=0.8,
        relative=0.2,
    ),
    "network_latency_s": ParameterSpec(
        description="seconds to start a collective between nodes", default=30e-6, relative=0.3
    ),
    "backward_overlap": ParameterSpec(
        description="share of the weight-gradient time that overlaps tensor-parallel collectives",
        default=1.0,
        relative=0.0,
    ),
    "step_s": ParameterSpec(description="fixed seconds per iteration", default=0.01, relative=1.0),
    "shape_time": ParameterSpec(
        description="measured over modelled time of a decoder layer of one shape",
        default=1.0,
        relative=0.1,
    ),
    "embedding_time": ParameterSpec(
        description="measured over modelled time of the embedding of one shape",
        default=1.0,
        relative=0.0,
    ),
    "head_time": ParameterSpec(
        description="measured over modelled time of final norm, head and loss of one shape",
        default=1.0,
        relative=0.0,
    ),
    "update_time": ParameterSpec(
        description="measured over modelled time of the optimizer step, gradient norm included",
        default=1.0,
        relative=0.0,
    ),
    "activation_memory": ParameterSpec(
        description="measured over counted bytes of activations",
        default=1.0,
        relative=0.15,
    ),
    "outside_memory_bytes": ParameterSpec(
        description="bytes of a chip that its framework's allocator does not hold (contexts, communication)",
        default=0.0,
        relative=0.0,
    ),
    "message_s": ParameterSpec(
        description="seconds per message over a WAN link in addition to delay and transfer (forwarding)",
        default=0.0,
        relative=0.0,
    ),
    "reserved_share": ParameterSpec(
        description="share of a reserved WAN link's rate that the transport reaches, unless `wan_share` was fitted",
        default=0.95,
        relative=0.05,
    ),
    "wan_share": ParameterSpec(
        description="share of a WAN link's rate, net of headers and loss, reached by the transport",
        default=0.8,
        relative=0.3,
    ),
}
"""Parameters by name. A calibration may set one for a single chip (`H20/matmul_share`), link
(`a>b/wan_share`), stack (`megatron/stack_factor`) or shape (`A100:h4096:n8192:tp4/shape_time`,
`CPU-core:h512:n256:v260/head_time`).
"""


def shape_scope(chip: str, hidden_size: int, tokens: float, tp: int) -> str:
    """Return the scope of a layer shape: chip, hidden size, tokens of a micro-batch, tensor parallelism."""
    return f"{chip}:h{hidden_size}:n{round(tokens)}:tp{tp}"


def vocabulary_scope(chip: str, hidden_size: int, tokens: float, vocab_size: int) -> str:
    """Return the scope of an embedding or head shape without tensor parallelism."""
    return f"{chip}:h{hidden_size}:n{round(tokens)}:v{vocab_size}"
