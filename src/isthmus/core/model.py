"""`Model`: what the user names (a Hugging Face folder or a `config.json`), read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from isthmus.core.base import Frozen
from isthmus.core.errors import ModelError

TRAINABLE = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures that the runtime cuts by layers and trains. Planning and simulation know more."""

MOST_LAYERS = 10_000
"""Decoder layers that a model may have; a mistake is refused before anybody reckons with each."""

LARGEST = 1_000_000_000
"""Largest dimension that a model may have."""

_MOST = {"num_hidden_layers": MOST_LAYERS, "hidden_size": LARGEST, "vocab_size": LARGEST}
Dimension = Annotated[int, Field(ge=1, le=LARGEST)]


class Model(Frozen):
    """A decoder-only transformer as its `config.json` states it; `config` is that file, whole.

    The layer-by-layer profile (parameters, FLOPs, bytes) is made from `config` in `isthmus.plan`.
    """

    path: str
    architecture: str
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden_size: Dimension
    vocab_size: Dimension
    config: dict[str, Any]

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer: as many as query heads where the file says nothing of them."""
        return int(self.config.get("num_key_value_heads") or self.config.get("num_attention_heads") or 1)

    @property
    def tied_embeddings(self) -> bool:
        """Whether the head shares the embedding's weights."""
        return bool(self.config.get("tie_word_embeddings", False))


def config_path(path: str | Path) -> Path:
    """Return the `config.json` meant by a folder or a file; raise `ModelError` if it is not there."""
    given = Path(path)
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise ModelError(
            f"no model at {given}",
            hint="give a folder that holds a config.json, or the config.json itself",
        )
    return file


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a folder or file."""
    file = config_path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", hint="check the file") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object")
    return config


def load_model(path: str | Path) -> Model:
    """Read a `Model` from a Hugging Face folder or `config.json`.

    Raises `ModelError` where the file is missing, is not JSON, or lacks a dimension that every model has.
    """
    config, file = read_config(path), config_path(path)
    text = config.get("text_config")  # where a multimodal folder keeps its decoder
    text = config if text is None else text
    if not isinstance(text, dict):
        raise ModelError(f"{file}: text_config is {text!r:.80}", hint="it holds the decoder's dimensions")
    architectures = config.get("architectures") or []
    if not (isinstance(architectures, list) and architectures):
        raise ModelError(f"{file}: 'architectures' is no list", hint='for example ["LlamaForCausalLM"]')
    sizes = {}
    for field, most in _MOST.items():
        value = text.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            hint = f"a whole number from 1 to {most:,} is needed"
            raise ModelError(f"{file}: {field} is {value!r:.80}", hint=hint)
        sizes[field] = value
    return Model(
        path=str(path),
        architecture=str(architectures[0]),
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        config=text,
    )


def require_trainable(model: Model) -> None:
    """Raise `ModelError` unless the runtime can cut and train `model`."""
    if model.architecture not in TRAINABLE:
        raise ModelError(
            f"{model.path}: the runtime does not train '{model.architecture}'",
            hint="it trains " + ", ".join(TRAINABLE),
        )
