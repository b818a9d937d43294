"""`pack_message` and `unpack_message`: orders, reports and what opens a connection, as JSON objects."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isthmus.core.errors import ProtocolError
from isthmus.rl.rollout.engine_messages import (
    DropSample,
    EndReport,
    Sampling,
    StartSample,
    SwitchVersion,
    TokensReport,
    VersionReport,
)


@dataclass(frozen=True, kw_only=True)
class EngineGreeting:
    """From the holder of the ledger: how responses are drawn, the parameters of the model, and a name of its config."""

    run: str
    sampling: Sampling
    parameters: dict[str, tuple[int, ...]]
    dtype: str
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """From an engine: how many samples it decodes at once, and the complete version that it has (-1: none).

    `problem` says why it cannot decode for this run.
    """

    num_slots: int
    step: int
    digest: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class VersionBegin:
    """Chunks of the version after `step` steps follow, as changes to version `base` (None: whole)."""

    step: int
    base: int | None


@dataclass(frozen=True, kw_only=True)
class VersionChunk:
    """A chunk, whose content is beside the message."""

    name: str
    start: int
    count: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class VersionEnd:
    """All chunks were sent; `digest` names the version."""

    step: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class VersionStaged:
    """From an engine: it has the version, or `problem` says why not."""

    step: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Nothing but that the connection lives."""


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """The run has ended."""


Message = (
    EngineGreeting | Ready | VersionBegin | VersionChunk | VersionEnd | VersionStaged | Beat | EndRun | StartSample
    | DropSample | SwitchVersion | TokensReport | EndReport | VersionReport
)  # fmt: skip
_KINDS = {one.__name__: one for one in Message.__args__}


def pack_message(message: Message) -> dict[str, Any]:
    """Return the message as a JSON object."""
    values = asdict(message)
    if isinstance(message, EngineGreeting):
        values["sampling"]["stop_tokens"] = sorted(message.sampling.stop_tokens)
    return {"type": type(message).__name__, **values}


def unpack_message(content: dict[str, Any]) -> Message:
    """Return the message of a JSON object; raises `ProtocolError` for what is none."""
    values = dict(content)
    kind = _KINDS.get(str(values.pop("type", "")))
    if kind is None:
        raise ProtocolError(f"unknown message '{content.get('type')!r:.60}'", hint="use one release at all sites")
    try:
        found: Message = _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"{kind.__name__}: {where}: {first['msg']}") from error
    return found


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
