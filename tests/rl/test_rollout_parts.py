"""Rules of what runs around the ledger: snapshots, its files, rewards, weights on a link, messages."""

from __future__ import annotations

import json
import random
import socket
import threading
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._rollout_faults import RolloutWorld
from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.core.errors import InputError, ProtocolError
from isthmus.core.job_parts.rl_job import RewardConfig
from isthmus.rl import LedgerConfig, TrajectoryLedger, check_trajectories, summarise_ledger
from isthmus.rl.aggregate_weights import aggregate_weights
from isthmus.rl.ledger.ledger_snapshot import dump_ledger, restore_ledger
from isthmus.rl.ledger.rollout_events import BytesCounted, EngineJoined, SampleKey, TokensReported
from isthmus.rl.policy_loss import policy_loss, policy_token_losses
from isthmus.rl.process.rollout_clock import RolloutClock
from isthmus.rl.rewards.reward_error import RewardError
from isthmus.rl.rewards.reward_function import RewardFunction
from isthmus.rl.rewards.reward_service import RewardService
from isthmus.rl.rewards.reward_sum import RewardSum
from isthmus.rl.rollout.engine_messages import TokensReport
from isthmus.rl.rollout.message_link import MessageLink
from isthmus.rl.rollout.rollout_store import RolloutStore
from isthmus.rl.rollout.wire_messages import pack_message, unpack_message

KEY = SampleKey(1, 0, 2)


def test_a_clock_divides_the_time_of_a_rank_among_causes() -> None:
    """What is taken adds up to the time that passed, and the next period begins empty."""
    times = iter([0.0, 1.0, 3.0, 7.0, 8.0, 8.0])
    clock = RolloutClock(lambda: next(times))
    clock.enter("wait_weights")
    clock.enter("decode")
    clock.add_tokens(40)
    clock.enter("wait_samples")
    assert clock.take() == {
        "wait_link_s": 1.0, "wait_weights_s": 2.0, "decode_s": 4.0, "wait_samples_s": 1.0, "decoded_tokens": 40.0,
        "rollout_tokens_per_s": 5.0,
    }  # fmt: skip
    assert not any(clock.take().values())


def test_bytes_by_owner_add_up_and_survive_a_snapshot() -> None:
    """What cannot be is refused."""
    config = LedgerConfig(group=2, batch_prompts=1, max_staleness=0)
    ledger = TrajectoryLedger(config)
    for size in (5, 7):
        ledger.handle(BytesCounted(owner="b", weights_bytes=size, sent_bytes=9, received_bytes=1))
    assert ledger.handle(BytesCounted(owner="b", weights_bytes=0, sent_bytes=-9, received_bytes=1))
    state = restore_ledger(config, json.loads(json.dumps(dump_ledger(ledger.state))))
    assert summarise_ledger(state).bytes == {"b": {"weights_bytes": 12, "sent_bytes": 18, "received_bytes": 2}}


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_ledger_goes_on_from_a_snapshot_taken_at_any_time(staleness: int) -> None:
    """Under faults of all kinds, the state is replaced by its snapshot after every third event: no rule breaks."""
    config = LedgerConfig(group=2, batch_prompts=2, max_staleness=staleness, num_prompts=8)
    count = 0

    def check(ledger: TrajectoryLedger) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            content = dump_ledger(ledger.state)
            instructions = ledger.state.instructions
            ledger.state = restore_ledger(config, json.loads(json.dumps(content)))
            assert dump_ledger(ledger.state) == content
            ledger.state.instructions = instructions
        check_trajectories(ledger.state)

    for seed in range(4):
        RolloutWorld(config, seed, 0.15, check).run()
    assert count > 100


def test_the_store_gives_back_what_was_appended_and_drops_a_line_that_was_cut(tmp_path: Path) -> None:
    """A snapshot begins a new log; a reader changes no file; damage is named."""
    store = RolloutStore(tmp_path)
    assert store.read()[0] is None
    store.snapshot({"ledger": 7})
    event = TokensReported(engine="a", sample=KEY, lease=3, start=0, num_tokens=2, version=0)
    store.append(event, tokens=[5, 6])
    store.append(EngineJoined(engine="a", owner="o", num_slots=1, version=0))
    store.close()
    log = tmp_path / "events-1.jsonl"
    log.write_bytes(log.read_bytes()[:-4])
    for is_reader in (True, False):
        snapshot, events = RolloutStore(tmp_path, is_reader=is_reader).read()
        assert snapshot is not None
        assert snapshot["ledger"] == 7
        assert list(events) == [(event, {"tokens": [5, 6]})]
        assert log.read_bytes().endswith(b"\n") == (not is_reader)
    log.write_text('{"event": "Nothing"}\n')
    with pytest.raises(InputError, match="is damaged"):
        list(RolloutStore(tmp_path).read()[1])


REWARDS = """
import time

def length(prompt, response, answer):
    print("a line of the function's own")
    return len(response) + (response == answer)

def late(prompt, response, answer):
    time.sleep(60)

def wrong(prompt, response, answer):
    raise KeyError(response)

def nan(prompt, response, answer):
    return float("nan")
"""


def test_rewards_are_summed_and_what_fails_is_named(tmp_path: Path) -> None:
    """A function that raises, is late, ends its process or is NaN gives no reward, and the next call has one."""
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    total = RewardSum((RewardConfig(exact=True, weight=2.0), RewardConfig(function=f"{file}:length", weight=0.5)))
    assert total("p", "abc", "abc") == 2 + 0.5 * 4
    assert total("p", "abcd", "abc") == 0.5 * 4
    total.close()
    for name, message in (("wrong", "raised KeyError"), ("nan", "is nan"), ("none", "raised AttributeError")):
        one = RewardSum((RewardConfig(function=f"{file}:{name}"),))
        with pytest.raises(RewardError, match=message):
            one("p", "abc", "abc")
        one.close()
    ticks = iter([0.0, 99.0])
    late = RewardFunction(f"{file}:late", 5.0, clock=lambda: next(ticks))
    with pytest.raises(RewardError, match="longer than 5 s"):
        late("p", "r", "a")
    late.close()


def test_a_service_rewards_or_is_named() -> None:
    """Another status, another body and a time-out give no reward."""

    def answer(request: httpx.Request) -> httpx.Response:
        response = json.loads(request.content)["response"]
        if response == "late":
            raise httpx.ReadTimeout("late", request=request)
        return httpx.Response(500 if response == "down" else 200, text=response)

    service = RewardService("http://localhost/score", 3.0, httpx.MockTransport(answer))
    assert service("p", '{"reward": 0.5}', "a") == 0.5
    for response, message in (("late", "longer than 3 s"), ("down", "no reward"), ("{}", "no reward"), ("x", "no")):
        with pytest.raises(RewardError, match=message):
            service("p", response, "a")
    service.close()


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_shares_of_the_loss_add_up_over_any_split(aggregate: str) -> None:
    """The weighted sums of two ranks' samples are the loss of one process, to 1e-6."""
    made = torch.Generator().manual_seed(3)
    logp, old = (-torch.rand(6, 5, generator=made) for _ in range(2))
    mask = torch.rand(6, 5, generator=made) > 0.4
    mask[:, 0] = True
    advantage = torch.randn(6, generator=made)
    clips = {"clip": (0.2, 0.28), "clip_dual": 3.0}
    whole = policy_loss(logp, old, advantage, mask, aggregate=aggregate, **clips)
    weights = aggregate_weights(mask, aggregate, 5)
    parts = [
        (policy_token_losses(logp[a:b], old[a:b], advantage[a:b], mask[a:b], **clips) * weights[a:b]).sum()
        for a, b in ((0, 2), (2, 6))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda one: (
            st.lists(one, max_size=3)
            | st.dictionaries(st.sampled_from(["type", "sample", "lease", "tokens"]), one, max_size=4)
        ),
    )
)
def test_any_object_is_a_message_or_refused(content: object) -> None:
    """A stranger's JSON gives a `ProtocolError`; a message of ours comes back as it was."""
    report = TokensReport(sample=KEY, lease=1, start=0, version=2, tokens=(1, 2), log_probabilities=(-0.1, -2.5))
    assert unpack_message(json.loads(json.dumps(pack_message(report)))) == report
    for values in (
        content if isinstance(content, dict) else {"type": content},
        pack_message(report) | {"tokens": content},
    ):
        try:
            found = unpack_message(values)
        except ProtocolError:
            continue
        assert isinstance(found, TokensReport)


@pytest.mark.parametrize("keyed", [True, False])
def test_messages_cross_a_link_and_strangers_do_not(keyed: bool) -> None:
    """With keys both sides prove theirs; a caller with another key, or bytes of no handshake, is refused."""
    keys = {site: LinkKeys(site, ("a", "b"), {"a": bytes(32), "b": bytes(31) + b"k"}) for site in "ab"}
    ours, theirs = socket.socketpair()
    found: list[MessageLink] = []
    accepts = threading.Thread(target=lambda: found.append(MessageLink.accepted(theirs, keys["a"] if keyed else None)))
    accepts.start()
    link = MessageLink.dialled(ours, keys["b"] if keyed else None, "b")
    accepts.join()
    content = random.Random(1).randbytes(600_000)
    sends = threading.Thread(target=lambda: link.send({"type": "x"}, content))
    sends.start()
    assert found[0].receive() == ({"type": "x"}, content)
    sends.join()
    assert link.sent_bytes == found[0].received_bytes
    link.close()
    with pytest.raises(OSError):
        found[0].receive()
    found[0].close()
    if keyed:
        ours, theirs = socket.socketpair()
        ours.sendall(bytes(64))
        with pytest.raises(ConnectionResetError):
            MessageLink.accepted(theirs, keys["a"])
        ours.close()
        theirs.close()
