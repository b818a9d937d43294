"""Writing a trained model: each stage its own shards, together a folder that any Hugging Face tool opens.

Shards wait in a hidden folder until every rank has written its own. Then rank 0 makes them the model, the
index last: a reader finds the complete model or none, also where the folder held another one before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from isthmus.core.errors import ModelError, UnavailableError
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.model import config_path, read_config
from isthmus.core.state_folder import sync_path
from isthmus.train.model.architecture import meta_model, model_class
from isthmus.train.model.load_weights import INDEX_FILE, SINGLE_FILE, StoredTensor, shard_tensors
from isthmus.train.model.stage_model import EMBEDDING, StageModel
from isthmus.train.model.stage_pieces import StagePieces
from isthmus.train.model.tensor_names import published_pieces
from isthmus.train.model.whole_parameters import whole_parameters

_PENDING = ".export"
_SHARD_BYTES = 4 << 30
_KEPT_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
_DTYPE_WORDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def export_shard(
    stage: StageModel | StagePieces,
    output: Path,
    rank: int,
    dtype: torch.dtype | None = None,
    *,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write the tensors of `stage`, in the published layout and as `dtype` (None: as they are), to `output`.

    They are no model before `finish_export`. Memory beyond the stage is at most `shard_bytes` (and one
    tensor). Of a tied embedding only the first stage's copy is written. Of the ranks that share a stage all
    call this, and the first writes. Raises `UnavailableError` where the disk is full or the folder cannot be
    written.
    """
    if stage.group.index > 0:
        for _ in whole_parameters(stage):
            continue
        return
    folder = output / _PENDING
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(_pending_name(rank, "*")):
            old.unlink()
        for part, tensors in enumerate(_shards(stage, dtype, shard_bytes)):
            file = folder / _pending_name(rank, f"{part:05d}")
            save_file(tensors, file, metadata={"format": "pt"})
            sync_path(file)
    except (OSError, SafetensorError) as error:
        raise _unwritable(output, error) from error


def make_output(output: Path) -> None:
    """Make the folder of the result; raise `UnavailableError` now rather than after the last step."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(output, error) from error


def check_output(output: Path, model: str | Path) -> None:
    """Raise `ModelError` where an export to `output` would overwrite the weights of the source."""
    source = config_path(model).parent
    if output.resolve() != source.resolve():
        return
    if (source / SINGLE_FILE).exists() or (source / INDEX_FILE).exists():
        raise ModelError(
            f"output {output} is the folder of the model itself",
            hint="name another output folder: the weights that training started from are kept",
        )


def finish_export(
    output: Path, model: str | Path, num_ranks: int, *, tokenizer_folder: Path | None = None
) -> None:
    """Turn the shards of ranks 0 to `num_ranks - 1` below `output` into the Hugging Face folder of `model`.

    Called by one rank after all have returned from `export_shard`. The configuration is that of `model` with
    the dtype of the shards; generation and tokenizer files come along from its folder and, before those, from
    `tokenizer_folder`. Raises `ModelError` where tensors are missing, doubled or mis-shaped, and
    `UnavailableError` where a rank's shards are not there or `output` cannot be written.
    """
    check_output(output, model)
    pending = _pending_files(output, num_ranks)
    stored = {file: shard_tensors(file) for file in pending}
    dtype = _check_complete(stored, model)
    names = {file: f"model-{i:05d}-of-{len(pending):05d}.safetensors" for i, file in enumerate(pending, 1)}
    try:
        for old in (output / INDEX_FILE, output / SINGLE_FILE, *output.glob("model-*-of-*.safetensors")):
            old.unlink(missing_ok=True)
        for file, name in names.items():
            file.replace(output / name)
        for folder in filter(None, (config_path(model).parent, tokenizer_folder)):
            _copy_kept(folder, output)
        write_atomically(output / "config.json", _json(_config(model, dtype)))
        write_atomically(output / INDEX_FILE, _json(_index(stored, names)))
        shutil.rmtree(output / _PENDING)
    except OSError as error:
        raise _unwritable(output, error) from error


def _shards(
    stage: StageModel | StagePieces, dtype: torch.dtype | None, shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the stage's published tensors, copied to the CPU, in groups of about `shard_bytes`."""
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


def _published_tensors(stage: StageModel | StagePieces) -> Iterator[tuple[str, torch.Tensor]]:
    for name, whole in whole_parameters(stage):
        if name == EMBEDDING and not stage.is_first:
            continue
        for piece in published_pieces(stage.architecture, name, tuple(whole.shape)):
            yield piece.name, piece.part_of(whole)


def _pending_name(rank: int, part: str) -> str:
    return f"rank-{rank:05d}-{part}.safetensors"


def _pending_files(output: Path, num_ranks: int) -> list[Path]:
    files = [sorted((output / _PENDING).glob(_pending_name(rank, "*"))) for rank in range(num_ranks)]
    missing = [rank for rank, of_rank in enumerate(files) if not of_rank]
    if missing:
        raise UnavailableError(
            f"{output} holds no shard of ranks {missing}",
            hint="output is a folder that the workers of all sites share",
        )
    return [file for of_rank in files for file in of_rank]


def _check_complete(stored: dict[Path, dict[str, StoredTensor]], model: str | Path) -> str:
    """Check that the shards hold each tensor of `model` once, of one dtype; return that as a word."""
    architecture = model_class(model).__name__
    expected = {
        piece.name: piece.shape
        for name, parameter in meta_model(model).named_parameters()
        for piece in published_pieces(architecture, name, tuple(parameter.shape))
    }
    found: dict[str, StoredTensor] = {}
    for file, tensors in stored.items():
        doubled = sorted(found.keys() & tensors.keys())
        if doubled:
            raise ModelError(
                f"tensor '{doubled[0]}' is in {file} and in another shard", hint="a layer is in one stage"
            )
        found |= tensors
    wrong = sorted(name for name in expected | found if _shape(found, name) != expected.get(name))
    dtypes = {tensor.dtype for tensor in found.values()}
    if wrong or len(dtypes) != 1:
        what = (
            f"tensor '{wrong[0]}' and {len(wrong) - 1} more differ" if wrong else f"dtypes differ: {dtypes}"
        )
        raise ModelError(
            f"the shards are not those of {model}: {what}", hint="do the stages of the plan cover the model?"
        )
    return _DTYPE_WORDS[dtypes.pop()]


def _shape(found: dict[str, StoredTensor], name: str) -> tuple[int, ...] | None:
    return found[name].shape if name in found else None


def _config(model: str | Path, dtype: str) -> dict[str, object]:
    """Return the model's own config.json with the dtype of the shards, under its old and its new name."""
    config = read_config(model)
    return {"model_type": model_class(model).config_class.model_type, **config, "dtype": dtype} | (
        {"torch_dtype": dtype} if "torch_dtype" in config else {}
    )


def _index(stored: dict[Path, dict[str, StoredTensor]], names: dict[Path, str]) -> dict[str, object]:
    total = sum(tensor.num_bytes for tensors in stored.values() for tensor in tensors.values())
    weight_map = {name: names[file] for file, tensors in stored.items() for name in tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _copy_kept(source: Path, output: Path) -> None:
    if source.resolve() == output.resolve():
        return
    for name in _KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)


def _json(value: dict[str, object]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _unwritable(output: Path, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"cannot write the model to {output}: {error}", hint="free the disk or name another folder"
    )
