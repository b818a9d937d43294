"""Rules of the tokenizer of a job: the model's own unless another is asked for, chosen once, of fitting size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.core.errors import DataError, FileError
from isthmus.core.files.model_tokenizer import (
    check_vocabulary,
    describe_tokenizer,
    pin_tokenizer,
    tokenizer_name,
    tokenizer_paths,
)
from isthmus.core.files.user_files import load_job
from isthmus.core.job import Job
from isthmus.core.model import load_model

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 300}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def read(folder: Path, data: str = "", **more: str) -> Job:
    """Write a job on `folder/model` and read it; `data` are further fields of its data."""
    rest = "".join(f"{key}: {value}\n" for key, value in more.items())
    (folder / "job.yaml").write_text(
        f"name: a\nmodel: model\noutput: out\ndata: {{paths: [text]{data}}}\n"
        f"training: {{steps: 3}}\ncheckpoints: {{folder: ck}}\n{rest}"
    )
    return load_job(folder / "job.yaml")


def test_the_models_own_tokenizer_is_the_default(tmp_path: Path, model: Path) -> None:
    """Found beside config.json, it is pinned by its path, which the note says."""
    (model / "tokenizer.json").write_text("{}")
    asked = read(tmp_path)
    pinned = pin_tokenizer(asked)
    assert pinned.data.tokenizer == tokenizer_name(asked) == str(model / "tokenizer.json")
    assert describe_tokenizer(asked, pinned).endswith("model/tokenizer.json, the model's own")


def test_bytes_replace_a_missing_tokenizer_aloud(tmp_path: Path, model: Path) -> None:
    """At submission a model without a tokenizer gets `bytes`, with a note; a worker never falls back by itself."""
    asked = read(tmp_path)
    pinned = pin_tokenizer(asked)
    assert pinned.data.tokenizer == "bytes"
    assert "bytes, one token per byte, since there is no tokenizer.json beside" in describe_tokenizer(asked, pinned)
    with pytest.raises(DataError, match=r"no tokenizer\.json beside the model") as caught:
        tokenizer_name(asked)
    assert "'bytes'" in str(caught.value.hint)


def test_bytes_that_were_asked_for_stay(tmp_path: Path, model: Path) -> None:
    """`tokenizer: bytes` wins over the model's own."""
    (model / "tokenizer.json").write_text("{}")
    asked = read(tmp_path, ", tokenizer: bytes")
    assert pin_tokenizer(asked) == asked
    assert describe_tokenizer(asked, asked) == "tokenizer: bytes, one token per byte, as data.tokenizer says"


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 300}}},
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 301}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 300, "content": "<x>"}]},
    ],
)
def test_ids_beyond_the_models_vocabulary_are_refused_with_both_numbers(
    tmp_path: Path, model: Path, tokenizer: dict[str, object]
) -> None:
    """301 ids do not fit 300 rows of the embedding; seen before anything runs."""
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    job = pin_tokenizer(read(tmp_path))
    with pytest.raises(DataError, match="has 301 tokens, the model only 300"):
        check_vocabulary(job, load_model(job.model))


def test_bytes_need_259_ids(tmp_path: Path, model: Path) -> None:
    """A vocabulary of 258 is one too small for the bytes and their three marks; a virtual job reads no data."""
    job = pin_tokenizer(read(tmp_path))
    small = load_model(job.model).model_copy(update={"vocab_size": 258})
    with pytest.raises(DataError, match="bytes has 259 tokens, the model only 258"):
        check_vocabulary(job, small)
    check_vocabulary(job.model_copy(update={"compute": "virtual"}), small)


@pytest.mark.parametrize("text", ["[", "[" * 100_000, "[1]", "{}", '{"model": 3, "added_tokens": {}}'])
def test_a_strange_tokenizer_file_is_named_or_left_to_the_workers(tmp_path: Path, model: Path, text: str) -> None:
    """What is not JSON is refused by name; JSON of another form has no size to check here."""
    (model / "tokenizer.json").write_text(text)
    job = pin_tokenizer(read(tmp_path))
    if text.startswith("[") and text != "[1]":
        with pytest.raises(DataError, match=r"tokenizer\.json is not JSON"):
            check_vocabulary(job, load_model(job.model))
    else:
        check_vocabulary(job, load_model(job.model))


def test_a_chat_template_is_read_into_the_job(tmp_path: Path, model: Path) -> None:
    """A path is replaced by the template, so that every site has it; text and `plain` stay."""
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert read(tmp_path, ", chat_template: chat.jinja").data.chat_template == "{{ messages }}"
    assert read(tmp_path, ", chat_template: plain").data.chat_template == "plain"
    assert read(tmp_path, ", chat_template: '{% if a %}{% endif %}'").data.chat_template == "{% if a %}{% endif %}"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("words", "has no {{"), ("{{" + " " * (1 << 18), "exceeds"), (b"\xff{{", "not UTF-8")],
)
def test_what_is_no_template_is_refused(tmp_path: Path, model: Path, content: str | bytes | None, message: str) -> None:
    """A missing, plain, endless or binary file is a `FileError` that says what a chat_template is."""
    if content is not None:
        (tmp_path / "chat.jinja").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError, match=message) as caught:
        read(tmp_path, ", chat_template: chat.jinja")
    assert "'plain'" in str(caught.value.hint)


def test_the_files_of_a_tokenizer_travel_together() -> None:
    """A site that fetches tokenizer.json fetches its settings and template too."""
    assert tokenizer_paths(None) == []
    assert tokenizer_paths("/m") == ["/m"]
    assert tokenizer_paths("/m/tokenizer.json")[:2] == ["/m/tokenizer.json", "/m/tokenizer_config.json"]
    assert "/m/chat_template.jinja" in tokenizer_paths("/m/tokenizer.json")
