"""Rules of the paged engine: a token follows from weights, seed, prompt, sample and position, and from nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from isthmus.core.errors import ConflictError, InputError, NotFoundError, UnavailableError
from isthmus.serve import DecodeRequest, PagedEngine, PagedEngineConfig, SequenceKey
from isthmus.serve.check_engine import Responses, check_engine, decode_all, decode_step
from tests.serve.small_models import CONFIGS, make_model, weights_of

pytestmark = pytest.mark.integration


def make_engine(name: str, version: int = 1, **sizes: int) -> PagedEngine:
    """Return an engine of a small model with the weights of seed `version`."""
    config = PagedEngineConfig(**{"num_pages": 64, "page_tokens": 4, "tile_rows": 8, "max_tiles": 4, **sizes})
    return PagedEngine(CONFIGS[name], config, version, weights_of(CONFIGS[name], version))


def make_requests(num: int, seed: int = 0) -> list[DecodeRequest]:
    """Return requests of unlike lengths, two samples for each prompt."""
    numbers = random.Random(seed)
    prompts = [tuple(numbers.choices(range(48), k=numbers.randint(1, 11))) for _ in range(num)]
    return [
        DecodeRequest(
            key=SequenceKey(index // 2, index % 2), seed=7, prompt_tokens=prompts[index // 2],
            max_response_tokens=numbers.randint(4, 9), temperature=(1.0, 0.7, 0.0)[index % 3],
        )
        for index in range(num)
    ]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_conforms(name: str) -> None:
    """Dense and sparse models, tied heads and sliding windows."""
    check_engine(
        lambda version: make_engine(name, version, max_tiles=8),
        lambda version: weights_of(CONFIGS[name], version),
        make_requests(5),
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_tokens_are_the_same_in_batches_of_any_size(name: str) -> None:
    """Tiers of 1 to 8 tiles, few sequences at once, few pages."""
    requests = make_requests(24)
    found = decode_all(make_engine(name), requests)
    for sizes in ({"max_tiles": 1}, {"max_tiles": 8}, {"max_sequences": 3}, {"num_pages": 11}):
        assert decode_all(make_engine(name, **sizes), requests) == found, sizes


def test_sequences_that_give_way_go_on() -> None:
    """Pages for two long responses and six sequences: some move to host memory and back."""
    requests = [
        DecodeRequest(key=SequenceKey(number, 0), seed=1, prompt_tokens=(number,), max_response_tokens=20)
        for number in range(6)
    ]
    engine = make_engine("qwen3", num_pages=13)
    assert decode_all(engine, requests) == decode_all(make_engine("qwen3"), requests)
    assert engine.num_swaps > 0


def test_tokens_are_the_same_after_moves_and_turns_at_any_time() -> None:
    """Three engines, moves between them, memory released to training and acquired: by seed, between steps."""
    requests = make_requests(16, seed=3)
    expected = decode_all(make_engine("qwen3"), requests)
    for seed in range(3):
        numbers, found = random.Random(seed), Responses()
        engines = [make_engine("qwen3", num_pages=20 + 8 * number, max_tiles=1 + number) for number in range(3)]
        for one in requests:
            numbers.choice(engines).add(one)
        moves = 0
        while any(one.num_sequences for one in engines):
            source, target = numbers.sample(engines, 2)
            decode_step(source, found)
            if numbers.random() < 0.2:
                source.release_memory()
                with pytest.raises(UnavailableError):
                    source.step()
            for key, response in found.items():
                if numbers.random() < 0.1 and 0 < len(response) < len(expected[key]):
                    moves += _move(key, source, target)
            source.acquire_memory()
        assert found == expected
        assert moves > 3


def _move(key: SequenceKey, source: PagedEngine, target: PagedEngine) -> int:
    """Move a sequence that `source` has; return how many moved."""
    try:
        content = source.export_sequence(key)
    except (ConflictError, NotFoundError):
        return 0
    source.stop(key)
    target.import_sequence(content)
    return 1


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_those_of_the_whole_sequence(name: str) -> None:
    """Of transformers' own forward pass over prompt and response, to 1e-4."""
    requests = [replace(one, temperature=0.7) for one in make_requests(6)]
    model = make_model(CONFIGS[name], 1)
    found = decode_all(make_engine(name), requests)
    for one in requests:
        tokens, log_probabilities = zip(*found[one.key], strict=True)
        whole = torch.tensor([[*one.prompt_tokens, *tokens]])
        with torch.no_grad():
            logits = model(whole).logits[0, len(one.prompt_tokens) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1)[range(len(tokens)), list(tokens)]
        torch.testing.assert_close(torch.tensor(log_probabilities), expected, rtol=0, atol=1e-4)


def test_a_shared_prefix_is_computed_once_and_never_under_other_weights() -> None:
    """The second sample finds the full pages of its prompt; after a switch none is found."""
    engine = make_engine("qwen3")
    prompt = tuple(range(13))
    request = DecodeRequest(key=SequenceKey(0, 0), seed=1, prompt_tokens=prompt, max_response_tokens=3)
    first = decode_all(engine, [request])
    engine.add(replace(request, key=SequenceKey(0, 1)))
    engine.step()
    other = decode_all(engine)
    assert engine.num_shared_rows == 12
    assert first.keys() != other.keys()
    engine.stage_weights(2, weights_of(CONFIGS["qwen3"], 2))
    engine.switch_weights(2, "keep")
    found = decode_all(engine, [replace(request, key=SequenceKey(0, 2))])
    assert engine.num_shared_rows == 12
    assert found == decode_all(make_engine("qwen3", 2), [replace(request, key=SequenceKey(0, 2))])


def test_weights_of_another_model_are_refused() -> None:
    """Missing, unknown and misshapen tensors are named; the engine decodes on with what it has."""
    engine, weights = make_engine("llama"), weights_of(CONFIGS["llama"], 1)
    requests = make_requests(4)
    expected = decode_all(engine, requests)
    for wrong in (
        {name: one for name, one in weights.items() if "k_proj" not in name},
        {**weights, "other.weight": torch.zeros(2)},
        {**weights, "lm_head.weight": torch.zeros(49, 64)},
    ):
        with pytest.raises(InputError):
            engine.stage_weights(2, wrong)
    assert decode_all(engine, requests) == expected


def test_a_sequence_whose_logits_are_nan_fails_alone() -> None:
    """Weights with NaN in one token's embedding: the sequence that has this token ends as failed."""
    weights = weights_of(CONFIGS["llama"], 1)
    weights["model.embed_tokens.weight"][5] = float("nan")
    engine = PagedEngine(CONFIGS["llama"], PagedEngineConfig(num_pages=64, page_tokens=4), 1, weights)
    good = [replace(one, prompt_tokens=(1, 2, 3)) for one in make_requests(2)]
    expected = decode_all(engine, good[:1])
    bad = DecodeRequest(key=SequenceKey(9, 0), seed=1, prompt_tokens=(4, 5, 6), max_response_tokens=4)
    engine.add(bad)
    engine.add(good[0])
    events = []
    while engine.num_sequences:
        events += engine.step()
    assert [(one.key, one.reason) for one in events if hasattr(one, "reason")] == [
        (bad.key, "failed"),
        (good[0].key, "length"),
    ]
    assert [one.token for one in events if hasattr(one, "token")] == [token for token, _ in expected[good[0].key]]
