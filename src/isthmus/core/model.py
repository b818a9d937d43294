"""`Model`: model dimensions from a Hugging Face folder or `config.json`, read without torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from isthmus.core.base_model import FrozenModel
from isthmus.core.bounded_file import read_within
from isthmus.core.errors import ModelError
from isthmus.core.model_parts.standard_keys import with_standard_keys

TRAINABLE_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that the runtime can split by layer and train. Planning and simulation support more."""

MAX_LAYERS = 10_000
"""Maximum number of decoder layers; rejects typos before any per-layer work."""

MAX_DIMENSION = 1_000_000_000
"""Maximum size of any model dimension."""

WEIGHTS_FILE, WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""Names of a model's only file of weights, and of the index of several."""

HUB_SCHEME = "hf://"
"""Prefix of the name of a model of the Hugging Face Hub."""

_HUB_NAME = re.compile(
    r"(hf://)?(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[A-Za-z0-9][\w./-]{0,127}))?"
)

_MAX_BY_FIELD = {"num_hidden_layers": MAX_LAYERS, "hidden_size": MAX_DIMENSION, "vocab_size": MAX_DIMENSION}
Dimension = Annotated[int, Field(ge=1, le=MAX_DIMENSION)]


@dataclass(frozen=True, kw_only=True)
class HubName:
    """The name of a model of the Hub: `ORG/NAME`, or `ORG/NAME@REVISION` with a branch, tag or commit."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Return the name that `text` is, with or without `hf://`; None if it is no such name."""
        found = _HUB_NAME.fullmatch(text)
        if found is None or ".." in text or "--" in found["repository"]:
            return None
        return cls(repository=found["repository"], revision=found["revision"])

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


class Model(FrozenModel):
    """A decoder-only transformer; `config` is the complete `config.json`.

    `isthmus.plan` derives the per-layer profile (parameters, FLOPs, bytes) from `config`.
    """

    path: str
    architecture: str
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    hidden_size: Dimension
    vocab_size: Dimension
    config: dict[str, Any]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads per layer; defaults to the number of query heads."""
        return int(self.config.get("num_key_value_heads") or self.config.get("num_attention_heads") or 1)

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output head and the embedding share weights."""
        return bool(self.config.get("tie_word_embeddings", False))


COMMAND_MODEL = Model(
    path="command://none", architecture="command", num_layers=1, hidden_size=1, vocab_size=1, config={}
)
"""Stands for the model of a job with `engine: command`, which has none that Isthmus knows."""


def config_path(path: str | Path) -> Path:
    """Return the `config.json` of a folder or file path; raise `ModelError` if it is missing."""
    given = Path(path)
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise ModelError(
            f"no model at {given}",
            hint="give a folder with a config.json, or the config.json itself",
        )
    return file


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a folder or file."""
    file = config_path(path)
    try:
        text = read_within(file).decode("utf-8")
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", hint="check the file") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return _config_of(text, file)


def _config_of(text: str, file: Path) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} does not contain a JSON object")
    return config


def load_model(path: str | Path) -> Model:
    """Read a `Model` from a Hugging Face folder or `config.json`.

    Raises `ModelError` if the file is missing, is not JSON, or lacks a required dimension.
    """
    return _model_of(read_config(path), config_path(path), str(path))


def read_model_text(text: str, path: str) -> Model:
    """Return the `Model` at `path`, which is not read: `text` is its `config.json`; raises the same errors."""
    name = Path("config.json")
    return _model_of(_config_of(text, name), name, path)


def _model_of(config: dict[str, Any], file: Path, path: str) -> Model:
    text = config.get("text_config")  # the decoder of a multimodal model
    text = config if text is None else text
    if not isinstance(text, dict):
        raise ModelError(f"{file}: text_config is {text!r:.80}", hint="expected the decoder's dimensions")
    architectures = config.get("architectures") or []
    if not (isinstance(architectures, list) and architectures):
        hint = 'for example ["LlamaForCausalLM"]'
        raise ModelError(f"{file}: 'architectures' must be a non-empty list", hint=hint)
    text = with_standard_keys(str(architectures[0]), text)
    sizes = {}
    for field, most in _MAX_BY_FIELD.items():
        value = text.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            hint = f"it must be an integer from 1 to {most:,}"
            raise ModelError(f"{file}: {field} is {value!r:.80}", hint=hint)
        sizes[field] = value
    return Model(
        path=path,
        architecture=str(architectures[0]),
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        config=text,
    )


def require_trainable(model: Model) -> None:
    """Raise `ModelError` unless the runtime can split and train `model`: its architecture, and its heads.

    `COMMAND_MODEL` passes.
    """
    if model == COMMAND_MODEL:
        return
    if model.architecture not in TRAINABLE_ARCHITECTURES:
        raise ModelError(
            f"{model.path}: the runtime does not support '{model.architecture}'",
            hint="supported: " + ", ".join(TRAINABLE_ARCHITECTURES),
        )
    heads, key_value_heads = (model.config.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(key_value_heads, int) and (key_value_heads < 1 or heads % key_value_heads):
        divisors = [str(one) for one in range(1, min(heads, 1024) + 1) if heads % one == 0]
        raise ModelError(
            f"{model.path}: num_key_value_heads {key_value_heads} does not divide num_attention_heads, {heads}",
            hint=f"valid values: {', '.join(divisors[:20])}",
        )
