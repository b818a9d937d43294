"""Rules of replayed routing: training takes the experts that engines took, and no report makes it take others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from isthmus.core.model_parts.routing_shape import RoutingShape
from isthmus.data import open_prompts
from isthmus.rl import LedgerConfig
from isthmus.rl.rewards.reward_pool import RewardPool
from isthmus.rl.rollout.engine_messages import EngineOrder, StartSample, TokensReport
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from isthmus.rl.rollout.wire_messages import pack_message, unpack_message
from isthmus.rl.routing.routing_rows import unpack_routing
from isthmus.serve import DecodeRequest, PagedEngine, PagedEngineConfig, SequenceKey, TokenDecoded
from isthmus.train.model.recompute import RecomputePolicy
from isthmus.train.model.stage_model import StageModel, build_stage
from tests.rl.rl_jobs import PROGRAM, make_rl_job
from tests.serve.small_models import SIZES, make_model
from tests.train.small_models import write_config
from tests.train.worker_jobs import at_site, make_plan, run_job, started, whole

SHAPE = RoutingShape(2, 2, 4)
ROW = SHAPE.row_bytes


def make_stage(folder: Path, layers: tuple[int, int]) -> StageModel:
    """Return layers of a model whose second layer is dense."""
    model = write_config(folder / "model", "qwen3-moe")
    return build_stage(model, layers, dtype=torch.float32, device="cpu", seed=3, weights="random")


def test_tokens_take_the_given_experts_weighted_by_the_router(tmp_path: Path) -> None:
    """Given the router's own choice the result is the same; given another, another; -1 is the router's choice.

    Two stages compute what one does, and layers computed again in backward have the same gradients.
    """
    stage, numbers = make_stage(tmp_path, (0, 4)), torch.Generator().manual_seed(1)
    tokens, found = torch.randint(0, 61, (2, 5), generator=numbers), list[torch.Tensor]()
    hooks = [
        one.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for one in stage.model.layers.values()
        if hasattr(one.mlp, "gate")
    ]
    plain = stage.compute(tokens)[0]
    for hook in hooks:
        hook.remove()
    own = torch.stack(found, dim=1).reshape(2, 5, 3, 2).to(torch.int16)
    assert torch.equal(stage.compute(tokens, routing=own)[0], plain)
    assert torch.equal(stage.compute(tokens, routing=torch.full_like(own, -1))[0], plain)
    other = own.clone()
    other[:, 2:] = (own[:, 2:] + 1) % 4
    changed = stage.compute(tokens, routing=other)[0]
    assert torch.equal(changed[:, :2], plain[:, :2])
    assert not torch.allclose(changed[:, 2:], plain[:, 2:])
    first, second = make_stage(tmp_path, (0, 2)), make_stage(tmp_path, (2, 4))
    torch.testing.assert_close(second.compute(first.compute(tokens, routing=other)[0], routing=other)[0], changed)
    gradients = []
    for kind in ("none", "full", "selective", "moe"):
        stage.zero_grad()
        stage.compute(tokens, RecomputePolicy(kind), other)[0].square().sum().backward()
        gradients.append([one.grad for one in stage.parameters() if one.grad is not None])
        assert any(float(one.mlp.gate.weight.grad.abs().sum()) for one in stage.model.layers.values()
                   if hasattr(one.mlp, "gate"))  # fmt: skip
    for again in gradients[1:]:
        assert all(map(torch.equal, gradients[0], again))


def start(folder: Path) -> tuple[RolloutCoordinator, list[EngineOrder | None]]:
    """Return a ledger's holder with an engine of two samples, and the orders to it."""
    job = make_rl_job(folder, "qwen3-moe")
    assert job.rl is not None
    limits = RolloutLimits(max_response_tokens=6, vocab_size=272, penalty_of=lambda _: 0.0, routing=SHAPE)
    config = LedgerConfig(group=2, batch_prompts=1, max_staleness=0, filter_groups=False)
    made = RolloutCoordinator(
        config, limits, open_prompts(job), RewardPool(job.rl.rewards, 1), RolloutStore(folder / "l")
    )
    made.begin(0)
    orders: list[EngineOrder | None] = []
    made.join_engine("b#1", "b", 2, 0, orders.append)
    return made, orders


def report(order: StartSample, start: int, count: int, routing: bytes) -> TokensReport:
    """Return a report of tokens."""
    return TokensReport(
        sample=order.sample, lease=order.lease, start=start, version=0, tokens=(5,) * count,
        log_probabilities=(-0.5,) * count, routing=routing,
    )  # fmt: skip


def rows(count: int, seed: int = 0) -> bytes:
    """Return the experts of some tokens."""
    numbers = np.random.default_rng(seed)
    return bytes(numbers.permuted(np.tile(np.arange(4, dtype=np.uint8), (count * 2, 1)), axis=1)[:, :2].tobytes())


def test_experts_are_kept_beside_tokens_through_ends_of_engine_and_process(tmp_path: Path) -> None:
    """A second engine is told which are known; after a restart, from a snapshot and a log, all are there."""
    made, orders = start(tmp_path)
    first = next(one for one in orders if isinstance(one, StartSample))
    length = len(first.prompt_tokens)
    sent = rows(length + 1)
    assert made.report("b#1", report(first, 0, 2, sent)) == ""
    made.save(0)
    made.lose_engine("b#1")
    orders.clear()
    made.join_engine("b#2", "b", 2, 0, orders.append)
    again = next(one for one in orders if isinstance(one, StartSample) and one.sample == first.sample)
    assert (again.routed_rows, len(again.response_tokens)) == (length + 1, 2)
    more = rows(3, seed=1)
    assert made.report("b#2", report(again, 2, 2, sent[-ROW:] + more[: 2 * ROW])) == ""  # one is said twice
    made.close()
    made, orders = start(tmp_path)
    last = next(one for one in orders if isinstance(one, StartSample) and one.sample == first.sample)
    assert last.routed_rows == length + 3
    assert made.report("b#1", report(last, 4, 1, more[2 * ROW :])) == ""
    assert bytes(made.sample(first.sample)[1].routing) == sent + more
    made.close()


@pytest.mark.parametrize(
    ("routing", "problem"),
    [
        (lambda length: b"", "no routing of tokens 0"),
        (lambda length: rows(length + 1)[:-1], "bytes of routing for"),
        (lambda length: rows(length + 2), "bytes of routing for"),
        (lambda length: rows(length)[ROW:], "no routing of tokens 0"),
        (lambda length: rows(length)[:-1] + b"\x04", "expert 4 of 4"),
        (lambda length: rows(length)[:-2] + b"\xff\x00", "expert 255 of 4"),
        (lambda length: b"\x01\x01" * 2 * length, "takes an expert twice"),
    ],
)  # fmt: skip
def test_routing_that_no_engine_of_the_model_reports_fails_its_sample(routing, problem, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Missing, cut, too long, beyond the experts, twice the same: named, nothing of it kept, and it begins again."""
    made, orders = start(tmp_path)
    first = next(one for one in orders if isinstance(one, StartSample))
    assert problem in made.report("b#1", report(first, 0, 1, routing(len(first.prompt_tokens))))
    again = [one for one in orders if isinstance(one, StartSample) and one.sample[:2] == first.sample[:2]][-1]
    assert again.routed_rows == 0
    assert again.lease != first.lease
    made.close()


def test_routing_crosses_a_connection_beside_the_message() -> None:
    """Bytes that are not of a message stay what they are."""
    order = StartSample(sample=(0, 0, 0), lease=1, prompt_tokens=(1,))  # type: ignore[arg-type]
    sent = report(order, 0, 1, rows(1))
    assert unpack_message(pack_message(sent), sent.routing).routing == sent.routing  # type: ignore[union-attr]


def test_a_batch_has_the_experts_of_each_token() -> None:
    """-1 where there are none; more than 256 experts take two bytes each."""
    found = unpack_routing(RoutingShape(1, 2, 300), [np.array([299, 1], "<u2").tobytes(), b""], 2)
    assert found.tolist() == [[[[299, 1]], [[-1, -1]]], [[[-1, -1]], [[-1, -1]]]]


def test_replayed_routing_brings_training_and_rollouts_together(tmp_path: Path) -> None:
    """In bfloat16 their routers part for some tokens: with the engine's experts their KL is a third or less."""
    sizes = SIZES | {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, tie_word_embeddings=False, norm_topk_prob=True)
    model, shape = make_model(config, 1).to(torch.bfloat16), RoutingShape(2, 2, 16)
    model.save_pretrained(tmp_path)
    options = PagedEngineConfig(num_pages=200, page_tokens=4, max_tiles=4, dtype=torch.bfloat16, records_routing=True)
    engine = PagedEngine(config, options, 1, model.state_dict())
    asked = [
        DecodeRequest(key=SequenceKey(number, 0), seed=1, prompt_tokens=(number, number + 1), max_response_tokens=14)
        for number in range(24)
    ]
    for one in asked:
        engine.add(one)
    events: dict[int, list[TokenDecoded]] = {number: [] for number in range(24)}
    while engine.num_sequences:
        for event in engine.step():
            if isinstance(event, TokenDecoded):
                events[event.key.prompt].append(event)
    tokens = torch.tensor([[*one.prompt_tokens, *(got.token for got in events[one.key.prompt])] for one in asked])
    sampled = torch.tensor([[got.log_probability for got in of_one] for of_one in events.values()])
    taken = unpack_routing(shape, [b"".join(got.routing for got in of_one) for of_one in events.values()], 15)
    stage = build_stage(tmp_path, (0, 2), dtype=torch.bfloat16, device="cpu", seed=0, weights="load")
    found = []
    for routing in (None, taken):
        with torch.no_grad():
            hidden = stage.compute(tokens[:, :-1], routing=routing)[0]
            apart = -stage.token_losses(hidden, tokens[:, 1:])[:, 1:] - sampled
        found.append(float((apart.exp() - 1 - apart).mean()))
    assert found[1] < found[0] / 3, found


@pytest.mark.slow
def test_training_on_any_plan_takes_the_experts_of_the_engine(tmp_path: Path) -> None:
    """Two stages learn what one process does; recomputed old log-probabilities take the engine's experts as well."""
    job = make_rl_job(tmp_path / "exact", "qwen3-moe", rl={"old": "recomputed", "replay_routing": True})
    losses = {}
    for name, plan in {"one": whole(job), "two": make_plan(job, [1, 4], "ba")}.items():
        run = run_job(tmp_path / name, at_site(job, tmp_path / name), plan, program=PROGRAM)
        losses[name] = [one.values["loss"] for rank in range(len(plan.ranks)) for one in run.metrics(rank)
                        if "loss" in one.values]  # fmt: skip
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-5)


@pytest.mark.slow
def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    """By the name of the field."""
    job = make_rl_job(tmp_path, rl={"replay_routing": True})
    with started(tmp_path / "run", job, whole(job), program=PROGRAM) as run:
        assert run.wait() != [0]
    assert "has no experts" in run.log(0)
