"""Rules of audits: what honest engines sampled is computed again, whatever happened to it; forgers are dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._rollout_forgers import (
    LENGTH,
    MAX_SAMPLES,
    SAMPLING,
    SUBTLE,
    find_forgers,
    honest_problems,
    make_engine,
    make_weights,
)
from isthmus.core.errors import InputError
from isthmus.data import open_prompts
from isthmus.rl import LedgerConfig, TrajectoryLedger, check_trajectories, summarise_ledger
from isthmus.rl.audit.choose_sample import is_chosen
from isthmus.rl.audit.judge_sample import FP32_BOUNDS, AuditBounds, judge_sample
from isthmus.rl.audit.token_difference import TokenDifference, token_difference
from isthmus.rl.audit.trajectory_auditor import SampleClaim, TrajectoryAuditor
from isthmus.rl.ledger.ledger_records import ENVIRONMENT, SampleRecord, TokenRange
from isthmus.rl.ledger.ledger_snapshot import dump_ledger, restore_ledger
from isthmus.rl.ledger.rollout_events import EngineJoined, SampleAudited, SampleEnded, SampleKey, TokensReported
from isthmus.rl.ledger.rollout_instructions import GenerateSample, OnUpdate
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.engine_messages import EndReport, EngineOrder, StartSample, TokensReport
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from isthmus.rl.rollout.trajectory import Trajectory
from isthmus.serve import DecodeRequest, PagedEngine, SequenceKey, TokenDecoded
from isthmus.serve.draw_token import draw_token
from tests.rl.rl_jobs import make_rl_job

KEY = SampleKey(3, 1, 0)
PROMPT = (4, 9, 2)


def test_every_forger_is_found_and_no_honest_engine_accused(whole: bool) -> None:
    """Forged tokens, log-probabilities, weights of 8 bits and of the step before; honest chips round differently."""
    for precision, kind, found_at in find_forgers():
        if (precision, kind) not in SUBTLE:
            assert found_at is not None, (precision, kind)
            assert found_at <= MAX_SAMPLES, (precision, kind)
    for precision in ("fp32", "bf16"):
        assert not any(honest_problems(precision, 1000 if whole else 64))


def decode(engine: PagedEngine, count: int, into: Trajectory) -> None:
    """Decode `count` tokens of the one sequence."""
    for _ in range(count):
        for event in engine.step():
            if isinstance(event, TokenDecoded):
                into.tokens.append(event.token)
                into.log_probabilities.append(event.log_probability)


@pytest.mark.parametrize("on_update", ["keep", "refill"])
def test_a_sample_is_recomputed_through_versions_and_engines(on_update: OnUpdate) -> None:
    """Decoded under two versions, then moved: the same bits, though another version gives other tokens.

    The owner of the token that differs is named; without a version nothing is said.
    """
    versions = dict(enumerate(make_weights(torch.float32), 1))
    engine, claim = make_engine(versions[1], 1, torch.float32, 8), Trajectory()
    request = DecodeRequest(
        key=SequenceKey(*KEY), seed=SAMPLING.seed, prompt_tokens=PROMPT, max_response_tokens=LENGTH,
        stop_tokens=frozenset(),
    )  # fmt: skip
    engine.add(request)
    decode(engine, 3, claim)
    engine.stage_weights(2, versions[2])
    engine.switch_weights(2, on_update)
    decode(engine, 2, claim)
    other = make_engine(versions[2], 2, torch.float32, 8)
    moved = {**vars(request), "response_tokens": tuple(claim.tokens)}
    other.add(DecodeRequest(**moved))
    decode(other, 3, claim)
    ends = [(0, 3, 1, "e", "b"), (3, 5, 2, "e", "b"), (5, 8, 2, "f", "c")]
    ranges = [TokenRange(start=a, end=b, version=v, engine=e, owner=o) for a, b, v, e, o in ends]
    known = dict(versions)
    exact = AuditBounds(log_probability=0.0, mean_log_probability=0.0, draw=0.0)
    auditor = TrajectoryAuditor(
        lambda version, weights, draw: make_engine(weights, version, torch.float32, 8, draw), known.get, SAMPLING,
        on_update, exact,
    )  # fmt: skip

    def found(trajectory: Trajectory) -> tuple[str, str] | None:
        sample = SampleRecord(key=KEY, ranges=ranges)
        return auditor.audit(SampleClaim(sample=sample, prompt_tokens=PROMPT, trajectory=trajectory))

    assert found(claim) == found(claim) == ("c", "")
    for position, owner in ((1, "b"), (4, "b"), (6, "c")):
        values = list(claim.log_probabilities)
        values[position] -= 1e-6
        accused = found(Trajectory(tokens=claim.tokens, log_probabilities=values))
        assert accused is not None
        assert (accused[0], f"token {position}" in accused[1]) == (owner, True)
    del known[2]
    assert found(claim) is None


def test_a_sample_of_several_turns_is_recomputed_with_what_it_observed() -> None:
    """Tokens of an environment are taken as they are; with others the engine's next tokens would not be drawn."""
    versions = dict(enumerate(make_weights(torch.float32), 1))
    engine, claim = make_engine(versions[1], 1, torch.float32, 8), Trajectory()
    request = {
        "key": SequenceKey(*KEY), "seed": SAMPLING.seed, "prompt_tokens": PROMPT, "max_response_tokens": LENGTH,
        "stop_tokens": frozenset(),
    }  # fmt: skip
    engine.add(DecodeRequest(**request))
    decode(engine, 3, claim)
    engine.stop(SequenceKey(*KEY))
    claim.tokens += [7, 8]
    claim.log_probabilities += [0.0, 0.0]
    engine.add(DecodeRequest(**request, response_tokens=tuple(claim.tokens)))
    decode(engine, 3, claim)
    ends = [(0, 3, "b"), (3, 5, ENVIRONMENT), (5, 8, "b")]
    ranges = [TokenRange(start=a, end=b, version=1, engine=owner, owner=owner) for a, b, owner in ends]
    auditor = TrajectoryAuditor(
        lambda version, weights, draw: make_engine(weights, version, torch.float32, 8, draw), versions.get, SAMPLING,
        "keep", AuditBounds(log_probability=0.0, mean_log_probability=0.0, draw=0.0),
    )  # fmt: skip
    sample = SampleRecord(key=KEY, ranges=ranges)
    for observed in ([7, 8], [7, 8], [7, 9]):
        tokens = [*claim.tokens[:3], *observed, *claim.tokens[5:]]
        forged = Trajectory(tokens=tokens, log_probabilities=claim.log_probabilities)
        found = auditor.audit(SampleClaim(sample=sample, prompt_tokens=PROMPT, trajectory=forged))
        assert found is not None
        assert (found[0], bool(found[1])) == ("b", observed != [7, 8])


@given(st.integers(0, 2**32), st.just(0.0) | st.floats(0.1, 3), st.integers(1, 40))
def test_the_token_that_is_drawn_has_no_difference(seed: int, temperature: float, size: int) -> None:
    """Of any logits, at any temperature; another token is as far away as its interval."""
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    request = DecodeRequest(
        key=SequenceKey(1, 2, 0), seed=seed, prompt_tokens=(1,), max_response_tokens=2, temperature=temperature
    )
    token, log_probability = draw_token(logits, request, 1)
    same = token_difference(logits, request, 1, token, log_probability)
    assert same.draw < 1e-12
    assert same.log_probability < 1e-9
    others = [token_difference(logits, request, 1, one, log_probability).draw for one in range(size) if one != token]
    assert all(one >= 0 for one in others)
    assert len([one for one in others if one == 0]) <= (1 if temperature else size)


def test_a_sample_is_judged_by_its_tokens_and_by_its_mean() -> None:
    """The first token beyond a bound is named."""
    none = TokenDifference(0.0, 0.0)
    assert judge_sample([none] * 3, FP32_BOUNDS) == (-1, "")
    assert judge_sample([none, TokenDifference(0.0, 0.1)], FP32_BOUNDS)[0] == 1
    assert judge_sample([none, TokenDifference(float("inf"), 0.0)], FP32_BOUNDS)[0] == 1
    assert "in the mean" in judge_sample([TokenDifference(9e-4, 0.0)] * 4, FP32_BOUNDS)[1]


def test_a_share_is_chosen_that_only_the_secret_gives() -> None:
    """About one in ten of 10,000; with another secret others."""
    keys = [SampleKey(n, n % 8, 0) for n in range(10_000)]
    chosen = [{key for key in keys if is_chosen(secret, key, 0.1)} for secret in (b"a" * 32, b"b" * 32)]
    assert all(900 < len(one) < 1100 for one in chosen)
    assert len(chosen[0] & chosen[1]) < 150
    assert not any(is_chosen(b"a", key, 0.0) for key in keys[:100])
    assert all(is_chosen(b"a", key, 1.0) for key in keys[:100])


def test_an_owner_that_is_barred_leaves_nothing_that_could_be_trained_on() -> None:
    """Its engines go and do not come back, its unclaimed samples begin again without a failure of their prompt."""
    config = LedgerConfig(group=2, batch_prompts=1, max_staleness=0)
    ledger = TrajectoryLedger(config)
    given = []
    for name in ("b", "c"):
        joined = ledger.handle(EngineJoined(engine=f"{name}#1", owner=name, num_slots=1, version=0))
        given += [one for one in joined if isinstance(one, GenerateSample)]
    for one in given:
        where = {"engine": one.engine, "sample": one.sample, "lease": one.lease}
        ledger.handle(TokensReported(**where, start=0, num_tokens=2, version=0))
    ended = {"engine": given[0].engine, "sample": given[0].sample, "lease": given[0].lease}
    ledger.handle(SampleEnded(**ended, num_tokens=2))
    ledger.handle(SampleAudited(sample=given[1].sample, owner="c", problem=""))
    ledger.handle(SampleAudited(sample=given[0].sample, owner="b", problem="token 1 is not the one drawn"))
    ledger.handle(SampleAudited(sample=given[1].sample, owner="z", problem="no tokens of z"))
    check_trajectories(ledger.state)
    found = summarise_ledger(ledger.state)
    assert found.samples == {"failed": 1, "in_flight": 2}
    assert found.audits == {"b": {"samples": 1, "differing": 1}, "c": {"samples": 1, "differing": 0}}
    assert list(found.barred) == ["b"]
    assert ledger.state.prompts[0].num_failures == 0
    ledger.handle(EngineJoined(engine="b#2", owner="b", num_slots=1, version=0))
    assert list(ledger.state.engines) == ["c#1"]
    assert dump_ledger(restore_ledger(config, dump_ledger(ledger.state))) == dump_ledger(ledger.state)


def test_the_coordinator_drops_a_forger_and_ends_without_honest_owners(tmp_path: Path) -> None:
    """The connection is ended, a new one refused; where no owner is left the run ends with the cause.

    A response that goes on after its end, or ends without one, fails before any audit.
    """
    job = make_rl_job(tmp_path)
    prompts = open_prompts(job)
    limits = RolloutLimits(
        max_response_tokens=4, vocab_size=300, penalty_of=lambda _: 0.0, stop_tokens=frozenset({7}),
        owners=frozenset({"b", "c"}),
    )  # fmt: skip

    def audit(sample: SampleRecord, _prompt: tuple[int, ...], claim: Trajectory) -> tuple[str, str]:
        return sample.ranges[-1].owner, "forged" if 9 in claim.tokens else ""

    config = LedgerConfig(group=4, batch_prompts=4, max_staleness=0)
    reward, store = RewardPool(job.rl.rewards, 1), RolloutStore(tmp_path / "l")
    made = RolloutCoordinator(config, limits, prompts, reward, store, audit)
    made.begin(0)
    orders: dict[str, list[EngineOrder | None]] = {"b": [], "c": []}

    def answer(name: str, tokens: tuple[int, ...]) -> str:
        start = next(one for one in orders[name] if isinstance(one, StartSample))
        orders[name].remove(start)
        report = TokensReport(
            sample=start.sample, lease=start.lease, start=0, version=0, tokens=tokens,
            log_probabilities=(-1.0,) * len(tokens),
        )  # fmt: skip
        made.report(f"{name}#1", report)
        return made.report(f"{name}#1", EndReport(sample=start.sample, lease=start.lease, num_tokens=len(tokens)))

    for name, sent in orders.items():
        assert made.join_engine(f"{name}#1", name, 4, 0, sent.append) == ""
    assert "without an end token" in answer("b", (5, 5))
    assert "goes on after the end token" in answer("b", (5, 7, 5))
    assert answer("b", (9, 7)) == ""
    until(lambda: None in orders["b"])
    assert "forged" in made.join_engine("b#2", "b", 4, 0, orders["b"].append)
    made.request_batch(0)
    assert answer("c", (9, 9, 9, 9)) == ""
    with pytest.raises(InputError, match="no owner is left"):
        until(lambda: made.wait_batch(0.01) is not None)
    made.close()
    other = RolloutCoordinator(config, limits, prompts, RewardPool(job.rl.rewards, 1), RolloutStore(tmp_path / "m"))
    other.begin(0)
    other.refuse_owner("b", "another model")
    assert other.wait_batch(0.0) is None
    other.refuse_owner("c", "another model")
    with pytest.raises(InputError, match="no owner is left that decodes: c: another model"):
        other.wait_batch(0.0)
    other.close()


def until(happened: Callable[[], bool]) -> None:
    """Wait for another thread."""
    for _ in range(10_000):
        if happened():
            return
        torch.zeros(1000).sum()
    raise AssertionError("it did not happen")
