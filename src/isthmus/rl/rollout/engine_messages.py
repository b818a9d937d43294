"""Messages between the holder of the ledger and an engine: orders to it, and its reports."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.rl.ledger.rollout_events import SampleKey
from isthmus.rl.ledger.rollout_instructions import OnUpdate


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How all responses of a run are drawn."""

    seed: int
    temperature: float
    max_response_tokens: int
    stop_tokens: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class StartSample:
    """Decode a sample after its prompt and the tokens that are recorded; reports carry the lease.

    The experts of the first `routed_rows` tokens are known.
    """

    sample: SampleKey
    lease: int
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...] = ()
    routed_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class DropSample:
    """Drop a sample, if its lease is this one."""

    sample: SampleKey
    lease: int


@dataclass(frozen=True, kw_only=True)
class SwitchVersion:
    """Decode by weights `version` from the next step on, once they are staged."""

    version: int
    on_update: OnUpdate


EngineOrder = StartSample | DropSample | SwitchVersion


@dataclass(frozen=True, kw_only=True)
class TokensReport:
    """Tokens number `start` and following of a response, with log-probabilities, all decoded by one version.

    Where routing is replayed, `routing` has the experts of all tokens before the last of these that were not reported
    yet; on a connection it is beside the message.
    """

    sample: SampleKey
    lease: int
    start: int
    version: int
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    routing: bytes = b""


@dataclass(frozen=True, kw_only=True)
class EndReport:
    """A response is complete; `failed` if the engine could not go on."""

    sample: SampleKey
    lease: int
    num_tokens: int
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class VersionReport:
    """The engine decodes by `version` from now on."""

    version: int


EngineReport = TokensReport | EndReport | VersionReport
