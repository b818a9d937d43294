"""Export a trained model as a Hugging Face folder; each stage writes its own shards.

Ranks write shards to a hidden folder. When all are there, rank 0 moves them into place and writes the index
last, so that a reader finds a complete model or none, even if the folder held another model before.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from isthmus.core.errors import ModelError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.model import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, config_path, read_config
from isthmus.core.process.state_folder_lock import fsync_path
from isthmus.train.model.gather_full_parameters import gather_full_parameters
from isthmus.train.model.huggingface_layout import published_tensors
from isthmus.train.model.load_weights import TensorHeader, read_tensor_headers
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import EMBEDDING_WEIGHT, StageModel
from isthmus.train.model.transformers_model import build_meta_model, model_class

_PENDING_FOLDER = ".export"
_SHARD_BYTES = 4 << 30
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def export_shard(
    stage: StageModel | ModelChunks,
    output: Path,
    rank: int,
    dtype: torch.dtype | None = None,
    *,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write the tensors of `stage` to `output` in the published layout, as `dtype` (None: unchanged).

    `finish_export` completes the model. Extra memory is at most `shard_bytes` plus one tensor. Of a tied
    embedding only the first stage's copy is written. All tensor-parallel ranks of a stage call this; the
    first writes. Raises `UnavailableError` if the disk is full or the folder is not writable.
    """
    if stage.group.tp_rank > 0:
        for _ in gather_full_parameters(stage):
            continue
        return
    folder = output / _PENDING_FOLDER
    try:
        if folder.is_symlink():
            raise FileExistsError(errno.EEXIST, f"{folder} is a link, which may lead to files of another job")
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(pending_name(rank, "*")):
            old.unlink()
        for part, tensors in enumerate(_shards(stage, dtype, shard_bytes)):
            file = folder / pending_name(rank, f"{part:05d}")
            save_file(tensors, file, metadata={"format": "pt"})
            fsync_path(file)
    except (OSError, SafetensorError) as error:
        _remove_pending(folder, rank)
        raise _write_error(output, error) from error


def _remove_pending(folder: Path, rank: int) -> None:
    """Remove what a rank has written of a failed export, and the folder once it is empty."""
    with suppress(OSError):
        for file in folder.glob(pending_name(rank, "*")):
            file.unlink()
        folder.rmdir()


def check_output(output: Path, model: str | Path) -> None:
    """Raise `ModelError` if an export to `output` would overwrite the source weights of `model`."""
    source = config_path(model).parent
    if output.resolve() != source.resolve():
        return
    if (source / WEIGHTS_FILE).exists() or (source / WEIGHTS_INDEX_FILE).exists():
        raise ModelError(
            f"output {output} is the folder of the source model",
            hint="use another output folder: an export must not overwrite the source weights",
        )


def finish_export(
    output: Path, model: str | Path, num_ranks: int, *, write_tokenizer: Callable[[], None] = lambda: None
) -> None:
    """Turn the shards of ranks 0 to `num_ranks - 1` below `output` into a Hugging Face folder of `model`.

    One rank calls this after all have returned from `export_shard`. The configuration is that of `model` with
    the dtype of the shards. `generation_config.json` is copied from the folder of `model`; `write_tokenizer` writes
    the tokenizer that training used. Raises `ModelError` if tensors are missing, duplicated or mis-shaped,
    and `UnavailableError` if shards of a rank are missing or `output` is not writable.
    """
    # Step 1: check that the shards form the complete model.
    check_output(output, model)
    pending = _pending_files(output, num_ranks)
    stored = {file: read_tensor_headers(file) for file in pending}
    dtype = _check_complete(stored, model)
    names = {file: f"model-{i:05d}-of-{len(pending):05d}.safetensors" for i, file in enumerate(pending, 1)}
    # Step 2: replace the old model by the shards; the index comes last.
    try:
        for old in (output / WEIGHTS_INDEX_FILE, output / WEIGHTS_FILE, *output.glob("model-*-of-*.safetensors")):
            old.unlink(missing_ok=True)
        for file, name in names.items():
            file.replace(output / name)
        _copy_generation_config(config_path(model).parent, output)
        write_tokenizer()
        write_atomically(output / "config.json", _json(_config(model, dtype)))
        write_atomically(output / WEIGHTS_INDEX_FILE, _json(_index(stored, names)))
        shutil.rmtree(output / _PENDING_FOLDER)
    except OSError as error:
        raise _write_error(output, error) from error


def _shards(
    stage: StageModel | ModelChunks, dtype: torch.dtype | None, shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the stage's published tensors by name, copied to the CPU, in groups of about `shard_bytes`."""
    group: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in _published_tensors(stage):
        group[name] = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
        num_bytes += group[name].nbytes
        if num_bytes >= shard_bytes:
            yield group
            group, num_bytes = {}, 0
    if group:
        yield group


def _published_tensors(stage: StageModel | ModelChunks) -> Iterator[tuple[str, torch.Tensor]]:
    for name, whole in gather_full_parameters(stage):
        if name == EMBEDDING_WEIGHT and not stage.is_first:
            continue
        for piece in published_tensors(stage.architecture, name, tuple(whole.shape)):
            yield piece.name, piece.view_of(whole)


def pending_folder(output: Path) -> Path:
    """Return the folder with the shards of an export that is not finished."""
    return output / _PENDING_FOLDER


def pending_name(rank: int, part: str) -> str:
    """Return the name of a rank's file in that folder."""
    return f"rank-{rank:05d}-{part}.safetensors"


def _pending_files(output: Path, num_ranks: int) -> list[Path]:
    files = [sorted((output / _PENDING_FOLDER).glob(pending_name(rank, "*"))) for rank in range(num_ranks)]
    missing = [rank for rank, of_rank in enumerate(files) if not of_rank]
    if missing:
        raise UnavailableError(
            f"{output} has no shards of ranks {missing}",
            hint="a restart repeats the export; with a backend other than isthmus all workers must share `output`",
        )
    return [file for of_rank in files for file in of_rank]


def _check_complete(stored: dict[Path, dict[str, TensorHeader]], model: str | Path) -> str:
    """Check that the shards hold each tensor of `model` once and in one dtype; return the dtype's name."""
    architecture = model_class(model).__name__
    expected = {
        piece.name: piece.shape
        for name, parameter in build_meta_model(model).named_parameters()
        for piece in published_tensors(architecture, name, tuple(parameter.shape))
    }
    found: dict[str, TensorHeader] = {}
    for file, tensors in stored.items():
        duplicates = sorted(found.keys() & tensors.keys())
        if duplicates:
            raise ModelError(
                f"tensor '{duplicates[0]}' is in {file} and in another shard",
                hint="check that each layer is in exactly one stage of the plan",
            )
        found |= tensors
    wrong = sorted(name for name in expected | found if _shape(found, name) != expected.get(name))
    dtypes = {tensor.dtype for tensor in found.values()}
    if wrong or len(dtypes) != 1:
        what = f"tensor '{wrong[0]}' and {len(wrong) - 1} more differ" if wrong else f"dtypes differ: {dtypes}"
        raise ModelError(
            f"the shards do not match {model}: {what}", hint="check that the plan's stages cover the model"
        )
    return _DTYPE_NAMES[dtypes.pop()]


def _shape(found: dict[str, TensorHeader], name: str) -> tuple[int, ...] | None:
    return found[name].shape if name in found else None


def _config(model: str | Path, dtype: str) -> dict[str, object]:
    """Return the config.json of `model` with the dtype of the shards, also as `torch_dtype` if present."""
    config = read_config(model)
    return {"model_type": model_class(model).config_class.model_type, **config, "dtype": dtype} | (
        {"torch_dtype": dtype} if "torch_dtype" in config else {}
    )


def _index(stored: dict[Path, dict[str, TensorHeader]], names: dict[Path, str]) -> dict[str, object]:
    total = sum(tensor.num_bytes for tensors in stored.values() for tensor in tensors.values())
    weight_map = {name: names[file] for file, tensors in stored.items() for name in tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _copy_generation_config(source: Path, output: Path) -> None:
    file = source / "generation_config.json"
    if source.resolve() != output.resolve() and file.is_file():
        shutil.copyfile(file, output / file.name)


def _json(value: dict[str, object]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write_error(output: Path, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"cannot write the model to {output}: {error}",
        hint="free space there: the weights are in the job's last checkpoint, and a restart or a new submission with "
        "`resume:` and its checkpoint folder only repeats the export",
    )
