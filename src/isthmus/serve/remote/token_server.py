"""`TokenServer`: what an adapter asks of a server for inference: the next token of each sequence, and other weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from isthmus.core.errors import UnavailableError

MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class TokenQuery:
    """A sequence and how its next token is drawn: by `seed`, at `temperature` (0: the most probable)."""

    tokens: tuple[int, ...]
    seed: int
    temperature: float


@dataclass(frozen=True, kw_only=True)
class TokenAnswer:
    """A token and its log-probability; None where the server could not decode the sequence."""

    token: int
    log_probability: float


class TokenServer(Protocol):
    """A server of one model. What it answers is checked by its caller."""

    name: str

    def next_tokens(self, queries: Sequence[TokenQuery]) -> list[TokenAnswer | None]:
        """Return the next token of each sequence; raises `UnavailableError` where the server fails."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Decode by the weights in `folder` from now on, without anything cached; raises `UnavailableError`."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def read_answer(values: Any, vocab_size: int) -> TokenAnswer | None:
    """Return a checked answer of [token, log-probability]; None for one that no model gives."""
    try:
        token, value = values
        token, value = int(token), float(value)
    except (TypeError, ValueError):
        return None
    if not 0 <= token < vocab_size or not math.isfinite(value) or value > 1e-4:
        return None
    return TokenAnswer(token=token, log_probability=min(value, 0.0))


def post_json(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """Return the JSON of an answer of at most `MAX_ANSWER_BYTES`; raises `UnavailableError`."""
    try:
        with client.stream("POST", path, json=body) as reply:
            content = b""
            for piece in reply.iter_bytes():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise UnavailableError(f"{client.base_url}{path} answered more than {MAX_ANSWER_BYTES} bytes")
            if reply.is_error or reply.is_redirect:
                told = content[:200].decode(errors="replace")
                raise UnavailableError(
                    f"{client.base_url}{path} answered {reply.status_code}: {told}", hint="see the server's log"
                )
        return httpx.Response(200, content=content).json() if content.strip() else None
    except (httpx.HTTPError, ValueError) as error:
        hint = "start the server, or set its address"
        raise UnavailableError(f"{client.base_url}{path}: {' '.join(str(error).split())[:200]}", hint=hint) from error
