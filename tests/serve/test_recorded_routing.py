"""Rules of recorded routing: an engine reports the experts of every token once, as the model chose them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from isthmus.core.errors import ConflictError, InputError
from isthmus.serve import DecodeRequest, PagedEngine, PagedEngineConfig, SequenceKey, TokenDecoded
from tests.serve.small_models import CONFIGS, make_model, weights_of

pytestmark = pytest.mark.integration

MODELS = ["qwen3_moe", "qwen2_moe", "mixtral"]
LAYERS, CHOSEN = 2, 2


def make_engine(name: str, **sizes: int) -> PagedEngine:
    """Return an engine that records routing."""
    sizes = {"num_pages": 64, "page_tokens": 4, "tile_rows": 8, "max_tiles": 4} | sizes
    config = PagedEngineConfig(**sizes, records_routing=True)
    return PagedEngine(CONFIGS[name], config, 1, weights_of(CONFIGS[name], 1))


def requests(count: int = 6) -> list[DecodeRequest]:
    """Return requests of which each pair shares a prompt of more than a page."""
    return [
        DecodeRequest(
            key=SequenceKey(number // 2, number % 2), seed=3, prompt_tokens=tuple(range(number // 2, number // 2 + 9)),
            max_response_tokens=7,
        )
        for number in range(count)
    ]  # fmt: skip


def decode(
    engine: PagedEngine, asked: list[DecodeRequest], *, in_turns: bool = False
) -> dict[SequenceKey, tuple[list[int], np.ndarray]]:
    """Return the tokens of each response and the experts [rows, layers, 2] that were reported with them.

    `in_turns`: the memory is released after each step, and acquired again.
    """
    for one in asked:
        engine.add(one)
    tokens: dict[SequenceKey, list[int]] = {one.key: [] for one in asked}
    routing = {one.key: b"" for one in asked}
    while engine.num_sequences:
        for event in engine.step():
            if isinstance(event, TokenDecoded):
                tokens[event.key].append(event.token)
                routing[event.key] += event.routing
        if in_turns:
            engine.release_memory()
            engine.acquire_memory()
    return {
        key: (tokens[key], np.frombuffer(routing[key], dtype=np.uint8).reshape(-1, LAYERS, CHOSEN)) for key in tokens
    }


def chosen_by_transformers(name: str, tokens: list[int]) -> np.ndarray:
    """Return the experts [tokens, layers, 2] that the model chooses in one forward pass."""
    model, found = make_model(CONFIGS[name], 1), list[torch.Tensor]()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack(found, dim=1).numpy()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_turns", [False, True])
def test_every_token_has_the_experts_that_the_model_chose(name: str, in_turns: bool) -> None:
    """Of prompts, also shared ones, and responses, also where the cache was in host memory; the last token has none."""
    engine = make_engine(name, max_tiles=1)
    for key, (tokens, routing) in decode(engine, requests(), in_turns=in_turns).items():
        whole = [*range(key.prompt, key.prompt + 9), *tokens]
        np.testing.assert_array_equal(np.sort(routing), np.sort(chosen_by_transformers(name, whole[:-1])))
    assert (engine.num_shared_rows > 0, engine.num_swaps > 0) == (not in_turns, in_turns)


def test_a_sequence_from_elsewhere_reports_what_is_not_known() -> None:
    """It goes on after 3 tokens, whose experts are known but for the last one's; what was known is not said again."""
    asked = requests(1)[0]
    ((tokens, routing),) = decode(make_engine("qwen3_moe"), [asked]).values()
    again = replace(asked, response_tokens=tuple(tokens[:3]), routed_rows=9 + 2)
    ((rest, rows),) = decode(make_engine("qwen3_moe"), [again]).values()
    assert rest == tokens[3:]
    np.testing.assert_array_equal(rows, routing[11:])
    with pytest.raises(InputError, match="routing of 12 of 12 tokens"):
        make_engine("qwen3_moe").add(replace(again, routed_rows=12))


def test_what_cannot_be_recorded_is_refused() -> None:
    """A model without experts, and a cache that moves without its routing."""
    with pytest.raises(InputError, match="no experts"):
        make_engine("qwen3")
    engine = make_engine("qwen3_moe")
    engine.add(requests(1)[0])
    engine.step()
    with pytest.raises(ConflictError, match="routing"):
        engine.export_sequence(SequenceKey(0, 0))
    with pytest.raises(InputError, match="no routing"):
        engine.import_sequence(b"")
