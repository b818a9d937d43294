"""The parameters of the time model: what each means, its value where nothing was measured, its uncertainty.

All are physical: shares of what a data sheet promises, latencies, and the host's pace. `relative` is the
standard deviation of the logarithm; the values are those of large products and NCCL on NVIDIA's chips since
2020, and say little of other chips: hence the wide bands of chips known by data sheet alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A parameter's meaning, default, and relative uncertainty (0: an assumption that is never fitted)."""

    text: str
    value: float
    relative: float


PARAMETERS: dict[str, Meaning] = {
    "matmul_share": Meaning(
        text="share of the chip's peak that large matrix products reach", value=0.8, relative=0.15
    ),
    "attention_share": Meaning(
        text="share of the peak that the attention core reaches", value=0.5, relative=0.4
    ),
    "memory_share": Meaning(
        text="share of the memory bandwidth that element-wise work reaches", value=0.85, relative=0.15
    ),
    "launch_s": Meaning(
        text="seconds the host needs to launch the forward pass of a layer", value=0.7e-3, relative=0.5
    ),
    "skew_s": Meaning(
        text="seconds of host time a collective costs for each further member", value=20e-6, relative=1.0
    ),
    "link_share": Meaning(
        text="share of the link inside a node that collectives reach", value=0.75, relative=0.15
    ),
    "link_latency_s": Meaning(text="seconds to start a collective inside a node", value=35e-6, relative=0.3),
    "network_share": Meaning(
        text="share of the network between nodes that collectives reach", value=0.8, relative=0.2
    ),
    "network_latency_s": Meaning(
        text="seconds to start an exchange between nodes", value=30e-6, relative=0.3
    ),
    "backward_overlap": Meaning(
        text="share of the weight-gradient work behind which tensor-parallel exchanges hide",
        value=1.0,
        relative=0.0,
    ),
    "step_s": Meaning(text="seconds an iteration takes beside its work", value=0.01, relative=1.0),
    "shape_time": Meaning(
        text="time of a decoder layer of one measured shape over what the other parameters say",
        value=1.0,
        relative=0.1,
    ),
    "embedding_time": Meaning(
        text="time of the embedding of one measured shape over what the other parameters say",
        value=1.0,
        relative=0.0,
    ),
    "head_time": Meaning(
        text="time of norm, head and loss of one measured shape over what the other parameters say",
        value=1.0,
        relative=0.0,
    ),
    "update_time": Meaning(
        text="time of the optimizer's update, gradient norm and all, over what the memory bandwidth says",
        value=1.0,
        relative=0.0,
    ),
    "message_s": Meaning(
        text="seconds a message takes over a WAN link beside its delay and its bytes: what forwards it",
        value=0.0,
        relative=0.0,
    ),
    "wan_share": Meaning(
        text="share of a WAN link's rate, headers and loss taken off, that a transport reaches",
        value=0.8,
        relative=0.3,
    ),
}
"""By name. A calibration may give one for a chip (`H20/matmul_share`), a link (`a>b/wan_share`) or a shape
(`A100:h4096:n8192:tp4/shape_time`, `CPU-core:h512:n256:v260/head_time`) alone.
"""


def shape_scope(chip: str, hidden_size: int, tokens: float, tp: int) -> str:
    """Return the scope of a layer's shape: chip, hidden size, tokens of a micro-batch, tensor parallelism."""
    return f"{chip}:h{hidden_size}:n{round(tokens)}:tp{tp}"


def vocabulary_scope(chip: str, hidden_size: int, tokens: float, vocab_size: int) -> str:
    """Return the scope of an embedding's or a head's shape, not cut by tensor parallelism."""
    return f"{chip}:h{hidden_size}:n{round(tokens)}:v{vocab_size}"
