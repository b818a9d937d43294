"""Rules of environments: tokens in, tokens out, what cannot be is named, and samples survive with their turns."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.errors import DataError, InputError
from isthmus.core.job_parts.rl_job import EnvironmentConfig, RlConfig
from isthmus.data import open_prompts
from isthmus.rl import LedgerConfig, TrajectoryLedger, check_trajectories, summarise_ledger
from isthmus.rl.environments.environment import Environment
from isthmus.rl.environments.make_turn_taker import make_turn_taker
from isthmus.rl.environments.turn_error import TurnError
from isthmus.rl.environments.turn_taker import TurnTaker
from isthmus.rl.ledger.ledger_records import ENVIRONMENT, TokenRange
from isthmus.rl.ledger.rollout_events import (
    BatchRequested,
    EngineJoined,
    EngineLost,
    EngineUpdated,
    ObservationAdded,
    SampleEnded,
    SampleKey,
    SampleScored,
    ScoreFailed,
    StepTrained,
    TokensReported,
    TrainerJoined,
)
from isthmus.rl.ledger.rollout_instructions import EventRefused, GenerateSample, ScoreSample, StopSample
from isthmus.rl.process.policy_batches import make_policy_batches
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.engine_messages import EndReport, EngineOrder, StartSample, TokensReport
from isthmus.rl.rollout.make_batch import make_batch, pack_batch, unpack_batch
from isthmus.rl.rollout.read_ledger import read_ledger
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from tests.rl.rl_jobs import make_rl_job
from tests.until import until

FUNCTIONS = '''
import time

def echo(prompt, turns, answer):
    """Answer the first turn, then end."""
    return None if len(turns) > 1 else f"[{prompt}{turns[-1]['text']}{answer}]"

def tokens(prompt, turns, answer):
    return (len(turns), turns[-1]["tokens"][0])

def wrong(prompt, turns, answer):
    raise KeyError("no such tool")

def odd(prompt, turns, answer):
    return 3.5

def far(prompt, turns, answer):
    return [300]

def long(prompt, turns, answer):
    return "x" * 9

def huge(prompt, turns, answer):
    return "x" * 100_000

def empty(prompt, turns, answer):
    return ""

def late(prompt, turns, answer):
    time.sleep(60)
'''


def taker(make: Callable[[Any], Environment], most: int = 20, **fields: Any) -> TurnTaker:
    """Return a taker over bytes as tokens, a vocabulary of 260."""
    config = EnvironmentConfig(**({"url": "http://tool/step", "max_observation_tokens": 8} | fields))
    return TurnTaker(config, most, 260, lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), make=make)


def pieces(*lengths: int) -> list[TokenRange]:
    """Return ranges of these lengths, by turns of the model and of the environment."""
    found, at = [], 0
    for number, length in enumerate(lengths):
        owner = ENVIRONMENT if number % 2 else "b"
        found.append(TokenRange(start=at, end=at + length, version=0, engine=owner, owner=owner))
        at += length
    return found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "has a function or a url; it has none"),
        ({"function": "t.py:f", "url": "http://a/b"}, "function and url"),
        ({"function": "t.py"}, "FILE.py:NAME"),
        ({"url": "file:///etc/passwd"}, "pattern"),
        ({"url": "http://user:word@host/"}, "pattern"),
        ({"url": "http://a/b", "max_turns": 0}, "greater than or equal to 1"),
        ({"url": "http://a/b", "stop": [""]}, "at least 1 character"),
        ({"url": "http://a/b", "scores": "first"}, "last_turn"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    """With the form."""
    with pytest.raises(ValidationError, match=message):
        RlConfig(max_prompt_tokens=1, max_response_tokens=1, reward={"exact": True}, environment=changed)


def test_files_of_functions_are_named_and_moved_together() -> None:
    """Those of rewards first, then that of the environment."""
    rl = RlConfig(
        max_prompt_tokens=1, max_response_tokens=1, environment={"function": "t.py:f"},
        reward=[{"exact": True}, {"function": "r.py:g"}],
    )  # fmt: skip
    assert rl.function_files == ("r.py", "t.py")
    moved = rl.with_function_files(("/x/r.py", "/y/t.py"))
    assert (moved.rewards[1].function, moved.environment.function) == ("/x/r.py:g", "/y/t.py:f")


def test_a_function_answers_turns_and_what_fails_is_named(tmp_path: Path) -> None:
    """It raises, is late, answers no text, tokens outside the vocabulary, none or too many: each is an error."""
    file = tmp_path / "tools.py"
    file.write_text(FUNCTIONS)

    def observe(name: str, ranges: list[TokenRange], tokens: bytes, **fields: Any) -> tuple[int, ...] | None:
        one = taker(Environment, function=f"{file}:{name}", url=None, **fields)
        try:
            return one.observe("p", "a", ranges, list(tokens))
        finally:
            one.close()

    assert observe("echo", pieces(2), b"hi") == tuple(b"[phia]")
    assert observe("echo", pieces(2, 2, 1), b"hi[]x") is None
    assert observe("tokens", pieces(2, 2, 1), b"hi[]x") == (3, ord("x"))
    wrong = {
        "wrong": "raised KeyError: 'no such tool'", "odd": "raised TypeError",
        "far": "token 300 in a vocabulary of 260",
        "long": "has 9 tokens, max_observation_tokens is 8", "huge": "ended", "empty": "answered no token",
        "none": "raised AttributeError",
    }  # fmt: skip
    for name, message in wrong.items():
        with pytest.raises(TurnError, match=message):
            observe(name, pieces(2), b"hi")
    with pytest.raises(TurnError, match=r"longer than 0\.05 s"):
        observe("late", pieces(2), b"hi", timeout_s=0.05)


def test_a_service_answers_turns_or_is_named() -> None:
    """Redirects are not followed; other status, other bodies and a time-out give no observation."""
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        body = json.loads(request.content)
        what = body["turns"][-1]["text"]
        if what == "late":
            raise httpx.ReadTimeout("late", request=request)
        if what == "away":
            return httpx.Response(302, headers={"location": "http://169.254.169.254/secret"})
        known = {"ok": {"observation": body["answer"]}, "end": {"observation": None}}
        return httpx.Response(200, json=known.get(what))

    one = taker(lambda config: Environment(config, httpx.MockTransport(answer)))
    assert one.observe("p", "a", pieces(2), list(b"ok")) == (ord("a"),)
    assert one.observe("p", "a", pieces(3), list(b"end")) is None
    for text, message in ((b"late", "longer than 10 s"), (b"away", "302"), (b"other", "gave no")):
        with pytest.raises(TurnError, match=message):
            one.observe("p", "a", pieces(len(text)), list(text))
    assert {str(request.url) for request in seen} == {"http://tool/step"}
    one.close()


class Scripted:
    """An environment that gives the same answer to any turn, and notes what it saw."""

    def __init__(self, found: Any) -> None:
        self.found, self.seen = found, []

    def answer(self, prompt: str, turns: Any, answer: str) -> Any:
        """Return the answer."""
        self.seen.append((prompt, [(one.by, one.text) for one in turns], answer))
        return self.found

    def close(self) -> None:
        """Do nothing."""


@given(st.one_of(st.none(), st.integers(), st.text(max_size=12), st.lists(st.integers(-9, 400), max_size=12),
                 st.dictionaries(st.text(max_size=2), st.none(), max_size=2), st.lists(st.booleans(), max_size=3)),
       st.integers(1, 20))  # fmt: skip
def test_any_answer_is_tokens_of_the_vocabulary_or_refused(found: Any, length: int) -> None:
    """And it leaves a token to decode, and is not longer than it may be."""
    one = taker(lambda _: Scripted(found))
    try:
        added = one.observe("p", "a", pieces(length), list(b"x" * length))
    except TurnError:
        return
    if added is not None:
        assert all(0 <= token < 260 for token in added)
        assert 0 < len(added) <= 8
        assert length + len(added) < 20


def test_turns_and_tokens_have_a_cap() -> None:
    """After the last turn, and where no token has room, it is not asked, or its answer ends the response."""
    scripted = Scripted("abc")
    one = taker(lambda _: scripted, max_turns=2)
    assert one.observe("p", "a", pieces(2, 3, 1), list(b"xxoooy")) is None
    assert one.observe("p", "a", pieces(20), list(b"x" * 20)) is None
    assert scripted.seen == []
    assert one.observe("p", "a", pieces(17), list(b"x" * 17)) is None
    assert one.observe("p", "a", pieces(16), list(b"x" * 16)) == tuple(b"abc")


def test_a_turn_is_whole_whoever_sampled_its_parts() -> None:
    """Ranges of several versions and engines are one turn; rewards get the last one, or all."""
    ranges = [
        TokenRange(start=0, end=1, version=0, engine="b#1", owner="b"),
        TokenRange(start=1, end=2, version=1, engine="c#1", owner="c"),
        TokenRange(start=2, end=4, version=1, engine=ENVIRONMENT, owner=ENVIRONMENT),
        TokenRange(start=4, end=5, version=1, engine="c#1", owner="c"),
    ]
    scripted = Scripted(None)
    one = taker(lambda _: scripted)
    one.observe("p", "a", ranges, list(b"hi42!"))
    assert scripted.seen == [("p", [("model", "hi"), ("environment", "42"), ("model", "!")], "a")]
    assert one.scored_text(ranges, list(b"hi42!")) == "!"
    assert taker(lambda _: scripted, scores="transcript").scored_text(ranges, list(b"hi42!")) == "hi42!"


def only(kind: type, found: list) -> list:
    """Return the instructions of one kind."""
    return [one for one in found if isinstance(one, kind)]


def begun(ledger: TrajectoryLedger, engine: str = "a") -> GenerateSample:
    """Return the first sample of an engine that joins with one slot."""
    return only(GenerateSample, ledger.handle(EngineJoined(engine=engine, owner=engine, num_slots=1, version=0)))[0]


def take_turn(ledger: TrajectoryLedger, one: GenerateSample, count: int, version: int = 0) -> ScoreSample:
    """Let an engine sample a turn; return what is asked then."""
    given_fields = {"engine": one.engine, "sample": one.sample, "lease": one.lease}
    ledger.handle(TokensReported(**given_fields, start=one.num_tokens, num_tokens=count, version=version))
    found = ledger.handle(SampleEnded(**given_fields, num_tokens=one.num_tokens + count))
    check_trajectories(ledger.state)
    return only(ScoreSample, found)[0]


def test_an_observation_lets_a_sample_go_on_where_its_rows_are() -> None:
    """1 turn of 2 tokens 2 an observation of 3 3 the same engine goes on after 5 4 late answers change nothing."""
    ledger = TrajectoryLedger(LedgerConfig(group=2, batch_prompts=1, max_staleness=1, max_failures=2))
    first = begun(ledger)
    ledger.handle(EngineJoined(engine="z", owner="z", num_slots=1, version=0))
    asked = take_turn(ledger, first, 2)
    added = ObservationAdded(sample=first.sample, score_try=asked.score_try, num_tokens=3)
    ledger.handle(EngineLost(engine="z"))
    found = ledger.handle(added)
    check_trajectories(ledger.state)
    (again,) = [one for one in only(GenerateSample, found) if one.sample == first.sample] or [None]
    if again is None:  # the other sample has the slot
        ledger.handle(EngineJoined(engine="y", owner="y", num_slots=1, version=0))
        sample = ledger.find(first.sample)
        again = GenerateSample(engine="y", sample=sample.key, lease=sample.lease, num_tokens=sample.num_tokens)
    assert again.num_tokens == 5
    for late in (added, SampleScored(sample=first.sample, score_try=1, reward=1.0)):
        assert ledger.handle(late) == []
    asked = take_turn(ledger, again, 1)
    assert asked.score_try == 2
    assert only(EventRefused, ledger.handle(ObservationAdded(sample=first.sample, score_try=2, num_tokens=0)))
    assert only(ScoreSample, ledger.handle(ScoreFailed(sample=first.sample, score_try=2))) == [
        ScoreSample(sample=first.sample, score_try=3)
    ]
    ledger.handle(SampleScored(sample=first.sample, score_try=3, reward=0.5))
    sample = ledger.find(first.sample)
    assert (sample.reward, sample.num_turns) == (0.5, 2)
    assert [(one.start, one.end, one.is_sampled) for one in sample.ranges] == [
        (0, 2, True),
        (2, 5, False),
        (5, 6, True),
    ]
    assert summarise_ledger(ledger.state).tokens["(environment)"] == {"in_flight": 3}


def test_an_engine_with_a_samples_rows_goes_on_with_it() -> None:
    """Of three engines with free slots, the one that sampled its turn; a sample of the group joins its prompt."""
    ledger = TrajectoryLedger(LedgerConfig(group=2, batch_prompts=1, max_staleness=0))
    first, second = ledger.handle(EngineJoined(engine="a", owner="a", num_slots=2, version=0))
    for name in "yz":
        ledger.handle(EngineJoined(engine=name, owner=name, num_slots=3, version=0))
    asked = take_turn(ledger, first, 2)
    (again,) = only(GenerateSample, ledger.handle(
        ObservationAdded(sample=first.sample, score_try=asked.score_try, num_tokens=1)
    ))  # fmt: skip
    assert (first.engine, second.engine, again.engine) == ("a", "a", "a")
    ledger.handle(EngineLost(engine="a"))
    held = {name: len(one.running) for name, one in ledger.state.engines.items()}
    assert sorted(held.values()) == [0, 2]  # both samples of the prompt are at one engine


def test_under_abort_a_turn_of_older_weights_begins_again() -> None:
    """1 a turn of version 0 has ended 2 step 0 is trained 3 the observation comes 4 the sample is stale."""
    ledger = TrajectoryLedger(
        LedgerConfig(group=2, batch_prompts=1, max_staleness=1, on_update="abort", filter_groups=False)
    )
    ledger.handle(TrainerJoined(trainer=1, version=0))
    ledger.handle(BatchRequested(trainer=1, step=0))
    todo = ledger.handle(EngineJoined(engine="a", owner="a", num_slots=4, version=0))
    for one in todo[:2]:
        asked = take_turn(ledger, one, 1)
        ledger.handle(SampleScored(sample=one.sample, score_try=asked.score_try, reward=1.0))
    asked = take_turn(ledger, todo[2], 2)
    ledger.handle(StepTrained(trainer=1, step=0))
    found = ledger.handle(ObservationAdded(sample=todo[2].sample, score_try=asked.score_try, num_tokens=1))
    check_trajectories(ledger.state)
    assert not only(StopSample, found)
    again = only(GenerateSample, ledger.handle(EngineUpdated(engine="a", version=1)))
    assert SampleKey(1, 0, 1) in {one.sample for one in again}
    assert summarise_ledger(ledger.state).samples["stale"] >= 1


def test_a_run_of_turns_survives_a_restart_and_masks_what_it_observed(tmp_path: Path) -> None:
    """1 a turn, its observation 2 the process ends 3 a new one gives the engine all tokens 4 the batch trains its own.

    A turn that goes on after a stop token fails; one of the observation's tokens may be a stop token.
    """
    (tmp_path / "tools.py").write_text(FUNCTIONS)
    job = make_rl_job(
        tmp_path, training={"global_batch_size": 2, "micro_batch_size": 2, "sequence_length": 32},
        rl={"group": 2, "max_response_tokens": 20, "filter_groups": False, "reward": {"exact": True},
            "environment": {"function": f"{tmp_path / 'tools.py'}:echo", "stop": ["?"]}},
    )  # fmt: skip
    prompts = open_prompts(job)
    end, stop = prompts.end_id, ord("?")
    assert prompts.stop_tokens == {end, stop}
    limits = RolloutLimits(
        max_response_tokens=20, vocab_size=272, penalty_of=lambda _: 0.0, stop_tokens=prompts.stop_tokens,
    )  # fmt: skip
    config = LedgerConfig(group=2, batch_prompts=1, max_staleness=0, filter_groups=False)

    def start() -> tuple[RolloutCoordinator, list[EngineOrder | None]]:
        made = RolloutCoordinator(
            config, limits, prompts, RewardPool(job.rl.rewards, 1), RolloutStore(tmp_path / "l"), None,
            make_turn_taker(job.rl, prompts, 272, 2),
        )  # fmt: skip
        made.begin(0)
        orders: list[EngineOrder | None] = []
        made.join_engine("b#1", "b", 2, 0, orders.append)
        return made, orders

    def sampled(made: RolloutCoordinator, one: StartSample, tokens: tuple[int, ...]) -> str:
        first = len(one.response_tokens)
        made.report("b#1", TokensReport(sample=one.sample, lease=one.lease, start=first, version=0, tokens=tokens,
                                        log_probabilities=(-0.5,) * len(tokens)))  # fmt: skip
        return made.report("b#1", EndReport(sample=one.sample, lease=one.lease, num_tokens=first + len(tokens)))

    made, orders = start()
    one = orders[0]
    assert isinstance(one, StartSample)
    assert "goes on after the end token" in sampled(made, one, (stop, 5))
    one = next(order for order in orders if isinstance(order, StartSample) and order.sample.attempt == 1)
    assert sampled(made, one, (65, stop)) == ""
    until(lambda: any(isinstance(order, StartSample) and len(order.response_tokens) > 2 for order in orders))
    made.close()
    made, orders = start()
    resumed = {order.sample: order for order in orders if isinstance(order, StartSample)}
    prompt = prompts.prompt(0)
    observed = tuple(f"[{prompt.text}A?{prompt.answer}]".encode())
    assert resumed[one.sample].response_tokens == (65, stop, *observed)
    made.request_batch(0)
    for order in resumed.values():
        assert sampled(made, order, (66, end) if order.response_tokens else (67, end)) == ""
    until(lambda: any(isinstance(order, StartSample) and order.response_tokens[:2] == (67, end) for order in orders))
    last = next(order for order in orders if isinstance(order, StartSample) and order.response_tokens[:2] == (67, end))
    assert sampled(made, last, (*prompt.answer.encode(), end)) == ""
    until(lambda: made.wait_batch(0.01) is not None)
    batch = make_batch(made, prompts, job.rl, made.wait_batch(0.0), 0)
    assert (batch.metrics["turns"], batch.metrics["reward"]) == (2.0, 0.5)
    row, begin = batch.keys.index(one.sample), len(prompt.tokens)
    mine = batch.tokens[row][batch.sampled[row]].tolist()
    assert mine == [65, stop, 66, end]
    assert batch.rollout_logp[row][~batch.sampled[row]].abs().sum() == 0
    (labels,) = make_policy_batches(
        unpack_batch(pack_batch(batch)), job.rl, 32, 2, (0, 2), None, is_first=True, is_last=True
    ).labels
    assert labels[row][labels[row] >= 0].tolist() == mine
    assert int((labels[row] >= 0).nonzero()[0]) == begin - 1
    made.close()


class Broken:
    """An environment that raises each time."""

    def answer(self, prompt: str, turns: Any, answer: str) -> Any:
        """Raise."""
        raise TurnError("environment step raised KeyError: no such tool")

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_whose_groups_are_all_useless_ends_with_the_cause(fails: bool, tmp_path: Path) -> None:
    """An environment that always raises, or rewards that are always equal: named after 64 groups in a row."""
    job = make_rl_job(tmp_path, training={"global_batch_size": 2, "micro_batch_size": 2},
                      rl={"group": 2, "reward": {"exact": True}})  # fmt: skip
    limits = RolloutLimits(max_response_tokens=6, vocab_size=272, penalty_of=lambda _: 0.0)
    made = RolloutCoordinator(
        LedgerConfig(group=2, batch_prompts=1, max_staleness=0), limits, open_prompts(job),
        RewardPool(job.rl.rewards, 1), RolloutStore(tmp_path / "l"), None,
        taker(lambda _: Broken() if fails else Scripted(None), most=6),
    )  # fmt: skip
    made.begin(0)
    orders: queue.Queue[EngineOrder | None] = queue.Queue()
    made.join_engine("b#1", "b", 2, 0, orders.put)
    made.request_batch(0)
    message = "64 groups in a row were filtered or failed: " + (
        "the environment of sample .* failed: environment step raised KeyError" if fails else "all rewards of prompt"
    )

    def decode_for_ever() -> None:
        while made.wait_batch(0.0) is None:
            one = orders.get(timeout=20)
            if isinstance(one, StartSample):
                made.report("b#1", TokensReport(sample=one.sample, lease=one.lease, start=0, version=0, tokens=(5,),
                                                log_probabilities=(-0.5,)))  # fmt: skip
                made.report("b#1", EndReport(sample=one.sample, lease=one.lease, num_tokens=1))

    with pytest.raises(InputError, match=message):
        decode_for_ever()
    made.close()
    told = read_ledger(tmp_path / "l")
    assert (told.lost, told.doubled, "trained" in told.samples) == (0, 0, False)


def test_a_stop_of_several_tokens_is_named(tmp_path: Path) -> None:
    """Before anything starts."""
    with pytest.raises(DataError, match="'ab' is 2 tokens of tokenizer bytes"):
        open_prompts(make_rl_job(tmp_path, rl={"environment": {"url": "http://a/b", "stop": ["ab"]}}))
