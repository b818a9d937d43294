"""`fetch_hub_model`: the folder of a model of the Hugging Face Hub, from this machine's cache or from the Hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from isthmus.core.errors import ModelError
from isthmus.core.files.model_tokenizer import TOKENIZER_FILE, TOKENIZER_FILES
from isthmus.core.model import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, HubName

CONNECT_TIMEOUT_S = 10.0
"""How long the Hub may take to answer which revision it has."""

MAX_INDEX_BYTES = 64 << 20
"""Largest index of weight files."""

_CONFIG_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
_WEIGHT_FILES = ("*.safetensors", WEIGHTS_INDEX_FILE)


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the Hub in a local folder."""

    folder: Path
    source: str
    """`ORG/NAME@COMMIT`."""


def fetch_hub_model(
    name: HubName,
    *,
    needs_weights: bool,
    cache: Path | None = None,
    endpoint: str | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> HubModel:
    """Return the model from the cache, else download it; only configuration, safetensors and tokenizer files.

    `cache` and `endpoint` are by default those of huggingface_hub, with its variables (`HF_HOME`, `HF_HUB_OFFLINE`,
    `HF_ENDPOINT`, `HF_TOKEN`). Raises `ModelError` if neither has the model; the hint says how to give a folder.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ModelError(f"{name} is a model of the Hub; huggingface_hub is not installed", hint=_hint(name)) from None
    files = [*_CONFIG_FILES, *(_WEIGHT_FILES if needs_weights else ())]

    def snapshot(revision: str | None, *, local_only: bool) -> Path:
        return Path(
            snapshot_download(
                name.repository,
                revision=revision,
                cache_dir=cache,
                endpoint=endpoint,
                allow_patterns=files,
                ignore_patterns=["*/*"],
                local_files_only=local_only,
                etag_timeout=timeout_s,
            )
        )

    # Step 1: the cache.
    cached = None
    try:
        cached = snapshot(name.revision, local_only=True)
    except (OSError, ValueError):
        cached = None
    usable = cached is not None and _missing(cached, needs_weights) is None
    if cached is not None and usable and (cached / TOKENIZER_FILE).is_file():
        return _found(name, cached)
    # Step 2: the Hub, at the commit that it names now.
    try:
        info = HfApi(endpoint=endpoint).model_info(name.repository, revision=name.revision, timeout=timeout_s)
        folder = snapshot(info.sha, local_only=False)
    except Exception as error:  # libraries of HTTP clients below huggingface_hub differ by version
        if cached is not None and usable:
            return _found(name, cached)
        reason = f"the Hub cannot be asked: {_first_line(error)}"
        missing = "" if cached is None else f", whose cached folder {cached} has {_missing(cached, needs_weights)}"
        raise ModelError(f"no model {name} in the cache{missing}, and {reason}", hint=_hint(name)) from error
    lacks = _missing(folder, needs_weights)
    if lacks is not None:
        raise ModelError(
            f"{name} has {lacks}: only safetensors weights are read, never pickled ones or code",
            hint="use task: pretrain, or a model whose weights are safetensors",
        )
    return _found(name, folder)


def _found(name: HubName, folder: Path) -> HubModel:
    """Return the model in a snapshot folder, whose name is the commit."""
    return HubModel(folder=folder, source=f"{name.repository}@{folder.name}")


def _missing(folder: Path, needs_weights: bool) -> str | None:
    """Return which file a snapshot folder lacks, as text, or None."""
    if not (folder / "config.json").is_file():
        return "no config.json"
    if not needs_weights or (folder / WEIGHTS_FILE).is_file():
        return None
    index = folder / WEIGHTS_INDEX_FILE
    if not index.is_file():
        return f"neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}"
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            return f"an index of weights above {MAX_INDEX_BYTES >> 20} MiB"
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = sorted(str(one) for one in names if Path(one).name != one or not one.endswith(".safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"a malformed {WEIGHTS_INDEX_FILE}"
    if outside:
        return f"an index that names {outside[0]!r:.80}, which is no safetensors file of the folder"
    return next((f"no {one}" for one in sorted(names) if not (folder / one).is_file()), None)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{text.splitlines()[0]:.200}"


def _hint(name: HubName) -> str:
    revision = f" --revision {name.revision}" if name.revision else ""
    return (
        f"on a machine with access run `hf download {name.repository}{revision} --local-dir FOLDER`, "
        "copy the folder to where all sites see it, and set model: FOLDER"
    )
