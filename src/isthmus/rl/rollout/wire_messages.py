"""`pack_message` and `unpack_message`: orders, reports and what opens a connection, as JSON objects."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from isthmus.core.errors import ProtocolError
from isthmus.rl.relay.relay_events import Coding, Version
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
    """From the holder of the ledger: how responses are drawn, the parameters of the model, and a name of its config.

    `relays` are the ranks that are asked for weights before the holder of the ledger, the nearest first.
    """

    run: str
    sampling: Sampling
    parameters: dict[str, tuple[int, ...]]
    dtype: str
    model: str = ""
    relays: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RelayGreeting:
    """From a rank that decodes to another one: it will ask for weights of the run."""

    run: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """From an engine: how many samples it decodes at once, and the complete version that it has.

    `problem` says why it cannot decode for this run.
    """

    num_slots: int
    version: Version | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class VersionOffer:
    """The newest version and those from which its changes can be had; the digests of its pieces are beside it."""

    version: Version
    bases: tuple[Version, ...]


@dataclass(frozen=True, kw_only=True)
class WeightsAsked:
    """Chunks are asked for: of each range, which rise, those from the first to before the last number."""

    coding: Coding
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class WeightsChunk:
    """A chunk, whose content is beside the message."""

    coding: Coding
    number: int
    kind: Literal["full", "changes"]


@dataclass(frozen=True, kw_only=True)
class WeightsLacking:
    """The chunks of a coding cannot be had here."""

    coding: Coding


@dataclass(frozen=True, kw_only=True)
class VersionStaged:
    """From an engine: it has the version, or `problem` says why not.

    `relayed` has the bytes received from and sent to the relays that it asked since the last message, by cluster.
    """

    version: Version
    problem: str = ""
    relayed: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Nothing but that the connection lives."""


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """The run has ended."""


Message = (
    EngineGreeting | RelayGreeting | Ready | VersionOffer | WeightsAsked | WeightsChunk | WeightsLacking | VersionStaged
    | Beat | EndRun | StartSample | DropSample | SwitchVersion | TokensReport | EndReport | VersionReport
)  # fmt: skip
_KINDS = {one.__name__: one for one in Message.__args__}


def pack_message(message: Message) -> dict[str, Any]:
    """Return the message as a JSON object; `routing` of a report goes beside it."""
    values = asdict(message)
    if isinstance(message, TokensReport):
        del values["routing"]
    if isinstance(message, EngineGreeting):
        values["sampling"]["stop_tokens"] = sorted(message.sampling.stop_tokens)
    return {"type": type(message).__name__, **values}


def unpack_message(content: dict[str, Any], beside: bytes = b"") -> Message:
    """Return the message of a JSON object, with the `routing` of a report; raises `ProtocolError` for what is none."""
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
    return replace(found, routing=beside) if isinstance(found, TokensReport) else found


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
