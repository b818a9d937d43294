"""`EngineRunner`: an engine that follows orders and reports what it decoded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from isthmus.core.errors import NotFoundError
from isthmus.rl.ledger.rollout_events import SampleKey
from isthmus.rl.rollout.engine_messages import (
    DropSample,
    EndReport,
    EngineOrder,
    EngineReport,
    Sampling,
    StartSample,
    SwitchVersion,
    TokensReport,
    VersionReport,
)
from isthmus.serve import DecodeEngine, DecodeRequest, DecodingEnded, SequenceKey, TokenDecoded

REPORT_TOKENS = 64
"""Tokens of a response after which they are reported: what a lost engine costs at most, for each sample."""


@dataclass(kw_only=True)
class _Pending:
    """A sample that runs: its lease, and tokens that are not reported yet, from position `start`, of one version.

    `routing` has the experts that are not reported yet.
    """

    lease: int
    start: int
    version: int = -1
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    routing: bytearray = field(default_factory=bytearray)


class EngineRunner:
    """Runs `engine` for one ledger: `handle` orders, `step`, and pass the reports on in their order."""

    def __init__(self, engine: DecodeEngine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._running: dict[SampleKey, _Pending] = {}
        self._reports: list[EngineReport] = []

    @property
    def version(self) -> int:
        """Return the version that decodes the next step."""
        return self._engine.version

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to decode and nothing to report."""
        return self._engine.num_sequences == 0 and not self._reports

    def stage(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy weights that a later order switches to; another thread may call this."""
        self._engine.stage_weights(version, weights)

    def handle(self, order: EngineOrder) -> None:
        """Follow an order; what it makes known is among the reports of the next `step`."""
        match order:
            case StartSample():
                self._start(order)
            case DropSample():
                pending = self._running.get(order.sample)
                if pending is not None and pending.lease == order.lease:
                    self._drop(order.sample)
            case SwitchVersion():
                self._switch(order)

    def reset(self) -> None:
        """Drop all samples and reports, as their holder is gone."""
        for key in list(self._running):
            self._drop(key)
        self._reports = []

    def step(self) -> list[EngineReport]:
        """Decode at most one token of each sample; return what is to be reported."""
        for event in self._engine.step() if self._engine.num_sequences else ():
            pending = self._running.get(SampleKey(*event.key))
            if pending is None:
                continue
            if isinstance(event, TokenDecoded):
                self._add_token(event, pending)
            else:
                self._end(event, pending)
        reports, self._reports = self._reports, []
        return reports

    def _start(self, order: StartSample) -> None:
        if order.sample in self._running:
            self._drop(order.sample)
        sampling = self._sampling
        self._engine.add(
            DecodeRequest(
                key=SequenceKey(*order.sample), seed=sampling.seed, prompt_tokens=order.prompt_tokens,
                max_response_tokens=sampling.max_response_tokens, temperature=sampling.temperature,
                stop_tokens=sampling.stop_tokens, response_tokens=order.response_tokens,
                routed_rows=order.routed_rows,
            )
        )  # fmt: skip
        self._running[order.sample] = _Pending(lease=order.lease, start=len(order.response_tokens))

    def _switch(self, order: SwitchVersion) -> None:
        if order.version <= self._engine.version:
            return
        for key, pending in self._running.items():
            self._flush(key, pending)
        for dropped in self._engine.switch_weights(order.version, order.on_update):
            self._running.pop(SampleKey(*dropped), None)
        self._reports.append(VersionReport(version=order.version))

    def _add_token(self, event: TokenDecoded, pending: _Pending) -> None:
        if pending.tokens and (len(pending.tokens) >= REPORT_TOKENS or pending.version != event.version):
            self._flush(SampleKey(*event.key), pending)
        pending.version = event.version
        pending.tokens.append(event.token)
        pending.log_probabilities.append(event.log_probability)
        pending.routing += event.routing

    def _end(self, event: DecodingEnded, pending: _Pending) -> None:
        key = SampleKey(*event.key)
        self._flush(key, pending)
        del self._running[key]
        self._reports.append(
            EndReport(
                sample=key, lease=pending.lease, num_tokens=event.num_tokens, failed=event.reason == "failed"
            )
        )  # fmt: skip

    def _flush(self, key: SampleKey, pending: _Pending) -> None:
        if not pending.tokens:
            return
        self._reports.append(
            TokensReport(
                sample=key, lease=pending.lease, start=pending.start, version=pending.version,
                tokens=tuple(pending.tokens), log_probabilities=tuple(pending.log_probabilities),
                routing=bytes(pending.routing),
            )
        )  # fmt: skip
        pending.start += len(pending.tokens)
        pending.tokens, pending.log_probabilities, pending.routing = [], [], bytearray()

    def _drop(self, key: SampleKey) -> None:
        self._running.pop(key, None)
        with suppress(NotFoundError):
            self._engine.stop(SequenceKey(*key))
