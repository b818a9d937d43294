"""`TrajectoryAuditor`: decodes a trajectory again at the versions that it claims, token by token as it claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isthmus.core.errors import IsthmusError
from isthmus.rl.audit.judge_sample import AuditBounds, judge_sample
from isthmus.rl.audit.token_difference import TokenDifference, token_difference
from isthmus.rl.ledger.ledger_records import SampleRecord, TokenRange
from isthmus.rl.ledger.rollout_instructions import OnUpdate
from isthmus.rl.rollout.engine_messages import Sampling
from isthmus.rl.rollout.trajectory import Trajectory
from isthmus.serve import DecodeEngine, DecodeRequest, DrawToken, SequenceKey

Weights = Mapping[str, torch.Tensor]
OpenEngine = Callable[[int, Weights, DrawToken], DecodeEngine]
"""Makes an engine with weights of a version and what draws its tokens."""


@dataclass(frozen=True, kw_only=True)
class SampleClaim:
    """A complete sample as its engines reported it, and the tokens of its prompt."""

    sample: SampleRecord
    prompt_tokens: tuple[int, ...]
    trajectory: Trajectory

    @property
    def key(self) -> SequenceKey:
        """Return its key at an engine."""
        return SequenceKey(*self.sample.key)


class TrajectoryAuditor:
    """Recomputes samples with an engine of its own.

    `weights_of` returns the weights of a version of the ledger, None for one that is no longer here.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        weights_of: Callable[[int], Weights | None],
        sampling: Sampling,
        on_update: OnUpdate,
        bounds: AuditBounds,
    ) -> None:
        self._open_engine, self._weights_of, self._sampling = open_engine, weights_of, sampling
        self._on_update, self._bounds = on_update, bounds
        self._engine: DecodeEngine | None = None
        self._claims: dict[SequenceKey, SampleClaim] = {}
        self._found: dict[SequenceKey, list[TokenDifference]] = {}

    def audit(self, claim: SampleClaim) -> tuple[str, str] | None:
        """Return the owner whose tokens differ and how, or the owner of the last tokens and "".

        None where a version is no longer here, or the weights give no numbers: nothing can be said.
        """
        return self.audit_all([claim])[0]

    def audit_all(self, claims: Sequence[SampleClaim]) -> list[tuple[str, str] | None]:
        """Return what `audit` says of each sample; those that one version and one engine decoded are computed at once.

        Their keys differ.
        """
        self._claims = {one.key: one for one in claims}
        self._found = {key: [] for key in self._claims}
        together: dict[int, list[SampleClaim]] = {}
        for one in claims:
            if len(one.sample.ranges) == 1:
                together.setdefault(one.sample.ranges[0].version, []).append(one)
        for version, of_version in together.items():
            if (weights := self._weights_of(version)) is not None:
                engine = self._begin(of_version, of_version[0].sample.ranges[0], weights)
                while engine.num_sequences:
                    engine.step()
        for one in claims:
            if len(one.sample.ranges) > 1:
                self._follow(one)
        return [self._judge(one) for one in claims]

    def _follow(self, claim: SampleClaim) -> None:
        """Compute a sample through its versions and engines, as far as it can be."""
        before: TokenRange | None = None
        engine = self._engine
        for piece in claim.sample.ranges:
            if not piece.is_sampled:  # the engine that goes on begins with all tokens so far
                if engine is not None and before is not None and engine.num_sequences:
                    engine.stop(claim.key)
                self._found[claim.key] += [TokenDifference(0.0, 0.0)] * (piece.end - piece.start)
                before = None
                continue
            if (weights := self._weights_of(piece.version)) is None:
                break
            if engine is None or before is None or piece.engine != before.engine:
                if engine is not None and before is not None and engine.num_sequences:
                    engine.stop(claim.key)
                engine = self._begin([claim], piece, weights)
            else:
                engine.stage_weights(piece.version, weights)
                engine.switch_weights(piece.version, self._on_update)
            while engine.num_sequences and len(self._found[claim.key]) < piece.end:
                engine.step()
            if len(self._found[claim.key]) < piece.end:
                return
            before = piece
        if engine is not None and engine.num_sequences:
            engine.stop(claim.key)

    def _begin(self, claims: Sequence[SampleClaim], piece: TokenRange, weights: Weights) -> DecodeEngine:
        """Return the engine with the tokens before `piece`, as the one that went on with the samples had them."""
        engine, sampling = self._engine, self._sampling
        if engine is None:
            engine = self._engine = self._open_engine(piece.version, weights, self._draw)
        else:
            engine.stage_weights(piece.version, weights)
            engine.switch_weights(piece.version, "abort")
        for one in claims:
            engine.add(
                DecodeRequest(
                    key=one.key, seed=sampling.seed, prompt_tokens=one.prompt_tokens,
                    max_response_tokens=len(one.trajectory.tokens), temperature=sampling.temperature,
                    response_tokens=tuple(one.trajectory.tokens[: piece.start]),
                )
            )  # fmt: skip
        return engine

    def _judge(self, claim: SampleClaim) -> tuple[str, str] | None:
        found, ranges = self._found[claim.key], claim.sample.ranges
        if not ranges or len(found) < ranges[-1].end:
            return None
        position, problem = judge_sample(found, self._bounds)
        at = next((one for one in ranges if one.start <= position < one.end), ranges[-1])
        return at.owner, problem

    def _draw(self, logits: np.ndarray, request: DecodeRequest, position: int) -> tuple[int, float]:
        """Take the token that is claimed, and note how far it is from the one that should be."""
        claim = self._claims[request.key].trajectory
        token, claimed = claim.tokens[position], claim.log_probabilities[position]
        self._found[request.key].append(token_difference(logits, request, position, token, claimed))
        return token, claimed


def audit_or_say(auditor: TrajectoryAuditor, claim: SampleClaim) -> tuple[str, str] | None:
    """Return what `auditor` finds, None where it could not compute; the cause is printed."""
    try:
        return auditor.audit(claim)
    except IsthmusError as error:
        print(f"warning: sample {tuple(claim.sample.key)} was not recomputed: {error.message}", flush=True)
        return None
