"""`RemoteEngine`: a `DecodeEngine` whose tokens a server for inference decodes."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from isthmus.core.errors import ConflictError, InputError, NotFoundError
from isthmus.serve.batching.decode_records import (
    DecodeEvent,
    DecodeRequest,
    DecodingEnded,
    OnSwitch,
    SequenceKey,
    TokenDecoded,
)
from isthmus.serve.draw_token import draw_number
from isthmus.serve.remote.token_server import TokenQuery, TokenServer
from isthmus.serve.sequence_file import SequenceHeader

_DIGEST_CHARS = 64
_BYTES_PER_TOKEN = 24


@dataclass(frozen=True, kw_only=True)
class RemoteModel:
    """What a server serves: its files beside the weights, its vocabulary, the longest sequence, and its parameters."""

    files: tuple[Path, ...]
    vocab_size: int
    max_tokens: int
    parameters: Mapping[str, tuple[int, ...]]


class RemoteEngine:
    """Asks `server` for a token of each sequence a step.

    The seed of each token follows from seed, prompt, sample and position, so a token does not depend on where its
    sequence was before; that it does not depend on the batch is up to the server. Versions are written below `folder`,
    which the server reads; the last two are kept. Prefixes are cached at the server, and none survives a switch: `keep`
    computes unfinished sequences again, as `refill` does. `version` is what the server has loaded.
    """

    def __init__(self, server: TokenServer, model: RemoteModel, version: int, folder: Path) -> None:
        self._server, self._model, self._folder = server, model, folder
        self._version, self._staged = version, -1
        self._sequences: dict[SequenceKey, DecodeRequest] = {}
        self._decoded: set[SequenceKey] = set()

    @property
    def version(self) -> int:
        """Return the version of the weights that decode the next step."""
        return self._version

    @property
    def num_sequences(self) -> int:
        """Return how many sequences have not ended."""
        return len(self._sequences)

    def add(self, request: DecodeRequest) -> None:
        """Queue a request; raises `InputError` for one that cannot be decoded, `ConflictError` for a key in use."""
        if request.key in self._sequences:
            raise ConflictError(f"sequence {tuple(request.key)} is being decoded", hint="stop it first")
        self._check(request)
        self._sequences[request.key] = request
        self._decoded.discard(request.key)

    def stop(self, key: SequenceKey) -> None:
        """Drop a sequence without an event; raises `NotFoundError`."""
        self._find(key)
        del self._sequences[key]

    def step(self) -> list[DecodeEvent]:
        """Decode a token of each sequence; what the server cannot decode ends as `failed`."""
        running = list(self._sequences.values())
        if not running:
            return []
        queries = [
            TokenQuery(
                tokens=(*one.prompt_tokens, *one.response_tokens), temperature=one.temperature,
                seed=int(draw_number(one, len(one.response_tokens)) * (2**31 - 1)),
            )
            for one in running
        ]  # fmt: skip
        events: list[DecodeEvent] = []
        for request, found in zip(running, self._server.next_tokens(queries), strict=True):
            position = len(request.response_tokens)
            if found is None:
                self._end(request, position, events, "failed")
                continue
            events.append(
                TokenDecoded(
                    key=request.key, position=position, token=found.token, log_probability=found.log_probability,
                    version=self._version,
                )
            )  # fmt: skip
            self._sequences[request.key] = replace(request, response_tokens=(*request.response_tokens, found.token))
            self._decoded.add(request.key)
            if found.token in request.stop_tokens:
                self._end(request, position + 1, events, "stop")
            elif position + 1 == request.max_response_tokens:
                self._end(request, position + 1, events, "length")
        return events

    def stage_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the weights of a later version where the server reads them; raises `InputError` for another model's."""
        if version <= self._version:
            raise InputError(f"version {version} after {self._version}", hint="versions rise")
        shapes = {name: tuple(one.shape) for name, one in weights.items()}
        if differing := sorted(
            name
            for name in shapes.keys() | self._model.parameters.keys()
            if shapes.get(name) != self._model.parameters.get(name)
        ):
            raise InputError(f"{differing[0]} has another shape, or is of another model", hint="bring its weights")
        whole = self._folder / f"version-{version}"
        made = whole.with_suffix(".tmp")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        for file in self._model.files:
            shutil.copy(file, made / file.name)
        tensors = {name: one.detach().cpu().contiguous().clone() for name, one in weights.items()}
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(whole, ignore_errors=True)
        made.rename(whole)
        self._staged = version

    def switch_weights(self, version: int, on_switch: OnSwitch) -> list[SequenceKey]:
        """Let the server load staged weights; return the sequences that were dropped (`abort`).

        Raises `ConflictError` for a version that is not staged.
        """
        if version != self._staged:
            raise ConflictError(f"version {version} is not staged", hint="stage it first")
        self._server.load_weights(self._folder / f"version-{version}")
        before, self._version = self._version, version
        for old in self._folder.glob("version-*"):
            number = old.name.removeprefix("version-")
            if number.isdecimal() and int(number) < before:
                shutil.rmtree(old, ignore_errors=True)
        dropped = [key for key in self._sequences if on_switch == "abort" and self._has_tokens(key)]
        for key in dropped:
            del self._sequences[key]
        return dropped

    def export_sequence(self, key: SequenceKey) -> bytes:
        """Return a sequence: its tokens, as its rows stay at the server; raises `ConflictError` before its first."""
        request = self._find(key)
        if key not in self._decoded:
            raise ConflictError(f"sequence {tuple(key)} has not decoded a token", hint="add its request elsewhere")
        header = SequenceHeader.of(
            request, list(request.response_tokens), arithmetic=self._arithmetic, version=self._version, uniform=True,
            rows=torch.empty(2, 0, 0, 0, 0),
        )  # fmt: skip
        text = header.model_dump_json().encode()
        return text + hashlib.sha256(text).hexdigest().encode()

    def import_sequence(self, content: bytes) -> SequenceKey:
        """Go on with a sequence that an engine of the same server, model and version exported.

        Raises `InputError` for content that is damaged or of another engine, and errors as in `add`.
        """
        most = _BYTES_PER_TOKEN * self._model.max_tokens + (1 << 16)
        text, digest = content[:-_DIGEST_CHARS], content[-_DIGEST_CHARS:]
        if len(content) > most or hashlib.sha256(text).hexdigest().encode() != digest:
            raise InputError(f"a sequence of {len(content)} bytes is cut or altered", hint="export it again")
        try:
            header = SequenceHeader.model_validate_json(text)
        except ValidationError as error:
            raise InputError(f"a sequence: {error.errors()[0]['msg']:.100}", hint="use one release") from error
        if header.arithmetic != self._arithmetic or header.version != self._version:
            raise InputError(
                f"a sequence of {header.arithmetic} at version {header.version}",
                hint=f"this engine is {self._arithmetic} at version {self._version}; send the tokens",
            )
        self.add(header.request())
        self._decoded.add(header.request().key)
        return header.request().key

    def close(self) -> None:
        """Close the connections to the server."""
        self._server.close()

    @property
    def _arithmetic(self) -> dict[str, str]:
        shapes = repr(sorted(self._model.parameters.items()))
        return {"server": self._server.name, "model": hashlib.sha256(shapes.encode()).hexdigest()}

    def _has_tokens(self, key: SequenceKey) -> bool:
        return bool(self._sequences[key].response_tokens)

    def _find(self, key: SequenceKey) -> DecodeRequest:
        if key not in self._sequences:
            raise NotFoundError(f"no sequence {tuple(key)}", hint="it has ended, or was never added")
        return self._sequences[key]

    def _end(self, request: DecodeRequest, count: int, events: list[DecodeEvent], reason: str) -> None:
        del self._sequences[request.key]
        events.append(DecodingEnded(key=request.key, num_tokens=count, reason=reason))  # type: ignore[arg-type]

    def _check(self, request: DecodeRequest) -> None:
        model, tokens = self._model, (*request.prompt_tokens, *request.response_tokens)
        if not request.prompt_tokens or request.max_response_tokens <= len(request.response_tokens):
            raise InputError("a request without a prompt or a token to decode", hint="give both")
        if len(request.prompt_tokens) + request.max_response_tokens > model.max_tokens:
            raise InputError(
                f"a prompt of {len(request.prompt_tokens)} and up to {request.max_response_tokens} response tokens",
                hint=f"the server takes sequences of at most {model.max_tokens}",
            )
        if outside := [one for one in tokens if not 0 <= one < model.vocab_size]:
            raise InputError(f"token {outside[0]} in a vocabulary of {model.vocab_size}", hint="use its tokenizer")
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            raise InputError(f"temperature {request.temperature}", hint="use 0 or more")
