"""Map the parameters of transformers to the tensors of published Hugging Face checkpoints.

transformers fuses the experts of a layer into two parameters, `gate_up_proj` [E, 2I, H] and `down_proj` [E,
H, I]; published checkpoints have three 2-D tensors per expert. All other parameters keep their names, except
Mixtral's router.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_FUSED_NAMES = re.compile(r"(model\.layers\.\d+)\.mlp\.(experts\.(?:gate_up_proj|down_proj)|gate\.weight)")


@dataclass(frozen=True, kw_only=True)
class PublishedTensor:
    """A stored tensor: `parameter[expert, rows]`, or the full parameter if both are None."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: slice | None = None

    def view_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of the full `parameter` that corresponds to this tensor; its shape is `shape`."""
        return parameter if self.expert is None else parameter[self.expert, self.rows]


def published_tensors(architecture: str, name: str, shape: tuple[int, ...]) -> Iterator[PublishedTensor]:
    """Yield the published tensors that exactly cover parameter `name` of `shape`, in expert order.

    `architecture` is the class name in `config.json`.
    """
    match = _FUSED_NAMES.fullmatch(name)
    mixtral = architecture == "MixtralForCausalLM"
    if match is None or (match[2] == "gate.weight" and not mixtral):
        yield PublishedTensor(name=name, shape=shape)
        return
    if match[2] == "gate.weight":
        yield PublishedTensor(name=f"{match[1]}.block_sparse_moe.gate.weight", shape=shape)
        return
    num_experts, num_rows, num_columns = shape
    parts = _expert_parts(match[2], num_rows, mixtral=mixtral)
    block = "block_sparse_moe" if mixtral else "mlp"
    for expert in range(num_experts):
        for projection, rows in parts:
            yield PublishedTensor(
                name=f"{match[1]}.{block}.experts.{expert}.{projection}.weight",
                shape=(rows.stop - rows.start, num_columns),
                expert=expert,
                rows=rows,
            )


def stored_layouts(architecture: str, name: str, shape: tuple[int, ...], *, tied: bool) -> list[list[PublishedTensor]]:
    """Return the layouts in which a folder may store parameter `name`, the published one first.

    A tied embedding may be stored under the name of the head.
    """
    layouts = [list(published_tensors(architecture, name, shape)), [PublishedTensor(name=name, shape=shape)]]
    if tied and name == "model.embed_tokens.weight":
        layouts.append([PublishedTensor(name="lm_head.weight", shape=shape)])
    return layouts


def _expert_parts(word: str, num_rows: int, *, mixtral: bool) -> list[tuple[str, slice]]:
    """Return the published projection name and rows of the fused parameter for each tensor of one expert."""
    if word.endswith("down_proj"):
        return [("w2" if mixtral else "down_proj", slice(0, num_rows))]
    gate, up = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
    return [(gate, slice(0, num_rows // 2)), (up, slice(num_rows // 2, num_rows))]
