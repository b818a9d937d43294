"""Rules of vLLM and SGLang behind the seam: the kit, against servers that speak their interfaces."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.core.errors import InputError, UnavailableError
from isthmus.serve import DecodeRequest, DecodingEnded, SequenceKey
from isthmus.serve.check_engine import check_engine, decode_all
from isthmus.serve.remote.remote_engine import RemoteEngine, RemoteModel
from isthmus.serve.remote.sglang_server import SglangServer
from isthmus.serve.remote.token_server import TokenServer
from isthmus.serve.remote.vllm_server import VllmServer
from tests.serve.stand_in_servers import VOCAB, Answer, Model, serving, sglang, vllm

ANSWERS = {"vllm": vllm, "sglang": sglang}
REQUESTS = [
    DecodeRequest(
        key=SequenceKey(number, 0), seed=5, prompt_tokens=(1, 2, number), max_response_tokens=4 + number,
        temperature=(1.0, 0.7, 0.0)[number],
    )
    for number in range(3)
]  # fmt: skip


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version."""
    return {"w": torch.full((2, 3), float(version))}


def server_at(kind: str, url: str) -> TokenServer:
    """Return the adapter of a kind of server."""
    return VllmServer(url, "small", VOCAB, 20.0) if kind == "vllm" else SglangServer(url, VOCAB, 20.0)


def model_at(folder: Path) -> RemoteModel:
    """Return the description of the stand-ins' model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return RemoteModel(
        files=(folder / "config.json",), vocab_size=VOCAB, max_tokens=64, parameters={"w": (2, 3)}
    )  # fmt: skip


@contextmanager
def engine_at(kind: str, folder: Path, answer: Answer) -> Iterator[RemoteEngine]:
    """Yield an engine at a stand-in."""
    with serving(answer) as url:
        engine = RemoteEngine(server_at(kind, url), model_at(folder), 1, folder / "weights")
        try:
            yield engine
        finally:
            engine.close()


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_server_behind_the_seam_keeps_its_rules(kind: str, tmp_path: Path) -> None:
    """`check_engine`: batches, moves, switches and refusals, over HTTP; nothing of an older version is kept on disk."""
    with ExitStack() as stack:
        made = 0

        def make(version: int) -> RemoteEngine:
            nonlocal made
            made += 1
            model = Model()
            model.weights = np.full((2, 3), version, np.float32).tobytes()
            url = stack.enter_context(serving(ANSWERS[kind](model)))
            folder = tmp_path / str(made)
            engine = RemoteEngine(server_at(kind, url), model_at(folder), version, folder / "weights")
            stack.callback(engine.close)
            return engine

        check_engine(make, weights, REQUESTS)
        engine = make(1)
        for version in (2, 3, 4):
            engine.stage_weights(version, weights(version))
            engine.switch_weights(version, "keep")
        assert sorted(one.name for one in (tmp_path / str(made) / "weights").iterdir()) == ["version-3", "version-4"]


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(
    ("status", "found", "message"),
    [(500, {"error": "out of memory"}, "answered 500"), (302, None, "answered 302"), (200, "text", None)],
)
def test_a_server_that_fails_is_named(kind: str, status: int, found: Any, message: str | None, tmp_path: Path) -> None:
    """Status, redirects that are not followed, and answers of no known form."""
    with engine_at(kind, tmp_path, lambda _path, _body: (status, found)) as engine:
        engine.add(REQUESTS[0])
        if message is None and kind == "vllm":
            assert engine.step() == [DecodingEnded(key=REQUESTS[0].key, num_tokens=0, reason="failed")]
            return
        with pytest.raises(UnavailableError, match=message or "did not answer 1 sequences"):
            engine.step()
        assert engine.num_sequences == 1


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("bad", [(VOCAB, -1.0), (-1, -1.0), (3, 0.5), (3, float("nan")), (3, None), ("x", -1.0)])
def test_what_no_model_gives_ends_a_sequence_as_failed(kind: str, bad: tuple[Any, Any], tmp_path: Path) -> None:
    """Tokens beyond the vocabulary, log-probabilities above 0 or NaN."""
    token, value = bad
    found = (
        {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [value]}}]} if kind == "vllm"
        else [{"meta_info": {"output_token_logprobs": [[value, token, None]]}}]
    )  # fmt: skip
    with engine_at(kind, tmp_path, lambda _path, _body: (200, found)) as engine:
        engine.add(REQUESTS[0])
        assert engine.step() == [DecodingEnded(key=REQUESTS[0].key, num_tokens=0, reason="failed")]
        assert engine.num_sequences == 0


def test_weights_of_another_model_and_folders_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """Before the server is asked, and where it says so; the version stays."""
    with engine_at("sglang", tmp_path, lambda _path, _body: (200, {"success": False, "message": "no file"})) as engine:
        for wrong in ({"w": torch.zeros(3, 2)}, {}, weights(2) | {"v": torch.zeros(1)}):
            with pytest.raises(InputError, match="another shape"):
                engine.stage_weights(2, wrong)
        with pytest.raises(InputError, match="versions rise"):
            engine.stage_weights(1, weights(1))
        engine.stage_weights(2, weights(2))
        with pytest.raises(UnavailableError, match=r"did not load .*no file"):
            engine.switch_weights(2, "keep")
        assert engine.version == 1


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With its address."""
    engine = RemoteEngine(server_at("vllm", "http://127.0.0.1:9"), model_at(tmp_path), 1, tmp_path / "weights")
    engine.add(REQUESTS[0])
    with pytest.raises(UnavailableError, match="127"):
        engine.step()
    engine.close()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_real_server_decodes_the_same_in_any_batch(kind: str, tmp_path: Path) -> None:
    """Where one runs: set ISTHMUS_VLLM or ISTHMUS_SGLANG to its address, and ISTHMUS_SERVED_MODEL to its folder."""
    url, folder = os.environ.get(f"ISTHMUS_{kind.upper()}"), os.environ.get("ISTHMUS_SERVED_MODEL")
    if not url or not folder:
        there = "is installed" if importlib.util.find_spec(kind) else "is not installed"
        pytest.skip(f"{kind} {there} here, and ISTHMUS_{kind.upper()} names no server of it")
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(folder).vocab_size
    server: TokenServer = VllmServer(url, folder, size) if kind == "vllm" else SglangServer(url, size)
    model = RemoteModel(files=(), vocab_size=size, max_tokens=64, parameters={})
    engine = RemoteEngine(server, model, 1, tmp_path)
    alone = {}
    for one in REQUESTS:
        alone |= decode_all(engine, [one])
    assert decode_all(engine, REQUESTS) == alone
    engine.close()
