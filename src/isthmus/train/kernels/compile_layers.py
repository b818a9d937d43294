"""`compile_layers`: decoder layers compiled by torch.compile, one graph for all equal layers of a stage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import nn

COMPILED_FOLDER = "compiled"
"""Folder of compiled graphs in the folder of a worker; its processes share it, so a restart compiles nothing."""


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer at its first call for a shape; their names and parameters stay."""
    for layer in layers:
        layer.compile(dynamic=False)


def keep_compiled_graphs(folder: Path) -> None:
    """Let torch keep compiled graphs in `folder` and take them from there; call it before the first compilation.

    Torch checks that a graph belongs to the code, versions and device at hand. The compiler runs in this process alone,
    so that nothing outlives a worker that is killed, and has its temporary files there too: a worker may be confined to
    its folder.
    """
    import torch._inductor.config as inductor_config  # loads the compiler, which takes seconds

    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = str(folder)
    inductor_config.compile_threads = 1
