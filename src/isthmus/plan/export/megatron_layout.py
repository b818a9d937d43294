"""`layout_text`: the model chunks in the format of Megatron-LM's `--pipeline-model-parallel-layout`.

`E` is the embedding, `t` a decoder layer (`t*12` twelve of them), `L` the loss; `|` separates chunks. They
are in forward order: the first chunk of every stage, then the second of every stage. Parsed by
`PipelineParallelLayerLayout` of megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence


def layout_text(chunk_layers: Sequence[Sequence[int]]) -> str:
    """Return the layout of `chunk_layers[chunk][stage]` decoder layers, e.g. `Et*3|tt|t*4L`."""
    pieces = [_layers(count) for chunk in chunk_layers for count in chunk]
    return "E" + "|".join(pieces) + "L"


def _layers(count: int) -> str:
    return f"t*{count}" if count > 2 else "t" * count
