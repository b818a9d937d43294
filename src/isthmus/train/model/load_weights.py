"""Load a stage's tensors from a Hugging Face folder with one safetensors file, or several and an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import ModelError
from isthmus.core.model import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, config_path, load_model
from isthmus.train.model.huggingface_layout import PublishedTensor, stored_layouts

MAX_WEIGHTS_INDEX_BYTES = 64 << 20
"""Largest index of weight files."""
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Header entry of a tensor in a safetensors file; `dtype` is the format's name (`BF16`)."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def load_weights(parameters: Iterable[tuple[str, torch.Tensor]], model: str | Path) -> None:
    """Fill `parameters` (full-model name, tensor) in place from the folder of `model`.

    Reads the published layout and the fused one, converts values to each parameter's dtype and device, and
    opens only files with tensors of this stage. Raises `ModelError` with tensor and file if a tensor is
    missing, has another shape or cannot be read.
    """
    described = load_model(model)
    with ExitStack() as files:
        source = _WeightFiles(config_path(model).parent, files)
        for name, parameter in parameters:
            layouts = stored_layouts(
                described.architecture, name, tuple(parameter.shape), tied=described.tied_embeddings
            )
            layout = next((one for one in layouts if one[0].name in source.file_of), layouts[0])
            for stored in layout:
                stored.view_of(parameter.detach()).copy_(source.read(stored))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in `folder`; raises `ModelError` if it has no safetensors weights."""
    single, index = folder / WEIGHTS_FILE, folder / WEIGHTS_INDEX_FILE
    if single.is_file():
        with _open_safetensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise ModelError(
            f"{folder} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}",
            hint="train from scratch (task: pretrain), or save the model as safetensors with save_pretrained",
        )
    try:
        weight_map = json.loads(read_within(index, MAX_WEIGHTS_INDEX_BYTES))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a valid index of safetensors files: {error!r}") from error


def read_tensor_headers(file: Path) -> dict[str, TensorHeader]:
    """Return the header entries of a safetensors file by tensor name."""
    with _open_safetensors(file) as opened:
        return {name: _tensor_header(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118 (no mapping)


def _tensor_header(header: Any) -> TensorHeader:
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    return TensorHeader(shape=shape, dtype=dtype, num_bytes=prod(shape) * _DTYPE_BYTES[dtype])


class _WeightFiles:
    """The weight files of a folder, opened on first use and closed by the exit stack `files`."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.folder = folder
        self._exit_stack = files
        self.file_of = tensor_files(folder)
        self._opened: dict[Path, Any] = {}

    def read(self, stored: PublishedTensor) -> torch.Tensor:
        """Return the stored tensor `stored` on the CPU, its shape checked."""
        if stored.name not in self.file_of:
            raise ModelError(
                f"{self.folder} has no tensor '{stored.name}' (it has {len(self.file_of)} tensors)",
                hint="check that config.json and the weights are of the same model and all files are there",
            )
        file = self.file_of[stored.name]
        if file not in self._opened:
            self._opened[file] = self._exit_stack.enter_context(_open_safetensors(file))
        try:
            tensor: torch.Tensor = self._opened[file].get_tensor(stored.name)
        except SafetensorError as error:
            raise ModelError(f"{file}: tensor '{stored.name}' cannot be read: {error}") from error
        if tuple(tensor.shape) != stored.shape:
            raise ModelError(
                f"{file}: tensor '{stored.name}' has shape {list(tensor.shape)}, config.json says {list(stored.shape)}",
                hint="check that config.json and the weights are of the same model",
            )
        return tensor


def _open_safetensors(file: Path) -> Any:
    """Return `file` opened for reading tensors, as a context manager."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="is the download complete?") from error
