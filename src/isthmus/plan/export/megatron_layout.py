"""`layout_text`: the pieces of a model as Megatron-LM's `--pipeline-model-parallel-layout` writes them.

`E` is the embedding, `t` a decoder layer (`t*12` twelve of them), `L` the loss, and `|` parts the pieces.
They stand in the order in which a token passes them: the first piece of every stage, then the second of
every stage. Read by `PipelineParallelLayerLayout` of megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence


def layout_text(parts: Sequence[Sequence[int]]) -> str:
    """Return the layout of `parts[chunk][stage]` decoder layers, e.g. `Et*3|tt|t*4L`."""
    pieces = [_layers(count) for chunk in parts for count in chunk]
    return "E" + "|".join(pieces) + "L"


def _layers(count: int) -> str:
    return f"t*{count}" if count > 2 else "t" * count
