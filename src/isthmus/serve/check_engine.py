"""Conformance kit for decode engines: `check_engine`.

It raises `AssertionError` with the broken rule. Engines of other sizes (batches, tiers) than those of `make` are
checked by comparing the results of `decode_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from isthmus.core.errors import ConflictError, InputError, IsthmusError, NotFoundError
from isthmus.serve.batching.decode_records import (
    DecodeRequest,
    DecodingEnded,
    OnSwitch,
    SequenceKey,
    TokenDecoded,
)
from isthmus.serve.decode_engine import DecodeEngine

MakeEngine = Callable[[int], DecodeEngine]
Weights = Callable[[int], Mapping[str, torch.Tensor]]
Responses = dict[SequenceKey, list[tuple[int, float]]]
"""Tokens and log-probabilities of each response."""

MAX_STEPS = 10_000


def check_engine(make: MakeEngine, weights: Weights, requests: Sequence[DecodeRequest]) -> None:
    """Check the rules of `DecodeEngine`; `make(version)` returns a new engine with `weights(version)`, a state_dict.

    `requests` are at least three, of different keys and without `response_tokens`, whose responses have at least three
    tokens each; an engine decodes all of them at once. Versions 1 and 2 are used; their tokens must differ in some
    response.
    """
    require(len(requests) >= 3, "the kit needs three requests")
    alone: Responses = {}
    for request in requests:
        alone |= decode_all(make(1), [request])
    require(all(len(one) >= 3 for one in alone.values()), "the kit needs responses of three tokens")
    _same_in_any_batch(make, requests, alone)
    _goes_on_after_tokens(make, requests, alone)
    _goes_on_after_a_move(make, requests, alone)
    _switches_between_steps(make, weights, requests, alone)
    _unfinished_at_a_switch(make, weights, requests)
    _stops(make, requests, alone)
    _refuses(make, requests)


def decode_all(engine: DecodeEngine, requests: Iterable[DecodeRequest] = ()) -> Responses:
    """Add `requests` and return all that the engine decodes until no sequence is left."""
    found: Responses = {}
    for one in requests:
        engine.add(one)
    for _ in range(MAX_STEPS):
        if not engine.num_sequences:
            return found
        decode_step(engine, found)
    raise AssertionError(f"{engine.num_sequences} sequences have not ended after {MAX_STEPS} steps")


def decode_step(engine: DecodeEngine, found: Responses) -> None:
    """Append the tokens of one step to `found`."""
    for event in engine.step():
        response = found.setdefault(event.key, [])
        if isinstance(event, TokenDecoded):
            require(event.version == engine.version, "a token names the version that decoded it")
            require(event.log_probability <= 0, "a log-probability is at most 0")
            response.append((event.token, event.log_probability))
        else:
            require(event.reason != "failed", "logits are finite")


def require(condition: bool, rule: str) -> None:
    """Raise `AssertionError` with the `rule` unless `condition` holds."""
    if not condition:
        raise AssertionError(rule)


def _same_in_any_batch(make: MakeEngine, requests: Sequence[DecodeRequest], alone: Responses) -> None:
    require(decode_all(make(1), requests) == alone, "a token does not depend on the batch")
    engine, found = make(1), Responses()
    for request in reversed(requests):
        engine.add(request)
        decode_step(engine, found)
    for key, tail in decode_all(engine).items():
        found.setdefault(key, []).extend(tail)
    require(found == alone, "a token does not depend on when other sequences come")


def _goes_on_after_tokens(make: MakeEngine, requests: Sequence[DecodeRequest], alone: Responses) -> None:
    begun = [replace(one, response_tokens=tuple(token for token, _ in alone[one.key][:2])) for one in requests]
    found = decode_all(make(1), begun)
    require(
        found == {key: response[2:] for key, response in alone.items() if len(response) > 2},
        "a response goes on after its tokens as where they were decoded",
    )


def _goes_on_after_a_move(make: MakeEngine, requests: Sequence[DecodeRequest], alone: Responses) -> None:
    source, target, found = make(1), make(1), Responses()
    for request in requests:
        source.add(request)
    while any(len(found.get(one.key, [])) < 2 for one in requests):
        decode_step(source, found)
    moved = [one.key for one in requests if len(found[one.key]) < len(alone[one.key])]
    for key in moved:
        content = source.export_sequence(key)
        source.stop(key)
        require(target.import_sequence(content) == key, "an imported sequence has its key")
    require(source.num_sequences == 0, "a stopped sequence is gone")
    for key, tail in decode_all(target).items():
        found[key].extend(tail)
    require(found == alone, "a moved sequence goes on as where it was")
    again = make(1)
    again.add(requests[0])
    decode_step(again, {})
    exported = again.export_sequence(requests[0].key)
    for place in (0, len(exported) // 2, len(exported) - 1):
        damaged = bytearray(exported)
        damaged[place] ^= 1
        _raises(InputError, partial(make(1).import_sequence, bytes(damaged)), "damage of an export is found")
    _raises(InputError, lambda: make(1).import_sequence(exported[:-7]), "a cut export is refused")
    _raises(InputError, lambda: make(2).import_sequence(exported), "an export of other weights is refused")


def _switches_between_steps(
    make: MakeEngine, weights: Weights, requests: Sequence[DecodeRequest], alone: Responses
) -> None:
    later = decode_all(make(2), requests)
    require(later != alone, "the kit needs versions that decode differently")
    engine = make(1)
    _raises(ConflictError, lambda: engine.switch_weights(2, "keep"), "weights are staged before they are used")
    engine.stage_weights(2, weights(2))
    require(decode_all(engine, requests) == alone, "staged weights change nothing before the switch")
    require(engine.switch_weights(2, "keep") == [] and engine.version == 2, "a switch names the version")
    require(decode_all(engine, requests) == later, "after a switch nothing of earlier versions is used")


def _unfinished_at_a_switch(make: MakeEngine, weights: Weights, requests: Sequence[DecodeRequest]) -> None:
    for on_switch in ("keep", "refill", "abort"):
        runs = [_switched(make, weights, batch, on_switch) for batch in (requests, requests[::-1])]
        alone: Responses = {}
        for one in requests:
            alone |= _switched(make, weights, [one], on_switch)
        require(runs == [alone, alone], f"what follows a switch ({on_switch}) does not depend on the batch")
        begun = make(1), Responses()
        begun[0].add(requests[0])
        decode_step(*begun)
        tokens = tuple(token for token, _ in begun[1][requests[0].key])
        tail = decode_all(make(2), [replace(requests[0], response_tokens=tokens)])[requests[0].key]
        if on_switch == "refill":
            require(alone[requests[0].key][1:] == tail, "after a refill the cache is that of the new weights")
        if on_switch == "abort":
            require(not any(alone.values()), "after an abort no sequence goes on")


def _switched(make: MakeEngine, weights: Weights, requests: Sequence[DecodeRequest], on_switch: OnSwitch) -> Responses:
    """Return the responses of sequences that are switched after their first token."""
    engine, found = make(1), Responses()
    engine.stage_weights(2, weights(2))
    for one in requests:
        engine.add(one)
    while any(not found.get(one.key) for one in requests):
        decode_step(engine, found)
    require(all(len(one) == 1 for one in found.values()), "the kit needs engines that decode all requests at once")
    dropped = engine.switch_weights(2, on_switch)
    require(set(dropped) == ({one.key for one in requests} if on_switch == "abort" else set()), "an abort names keys")
    for key in dropped:
        found[key] = []
    for key, tail in decode_all(engine).items():
        found[key].extend(tail)
    return found


def _stops(make: MakeEngine, requests: Sequence[DecodeRequest], alone: Responses) -> None:
    engine, found = make(1), Responses()
    for one in requests:
        engine.add(one)
    decode_step(engine, found)
    engine.stop(requests[0].key)
    before = len(found.pop(requests[0].key, []))
    for key, tail in decode_all(engine).items():
        found.setdefault(key, []).extend(tail)
    require(found == {one.key: alone[one.key] for one in requests[1:]}, "a stopped sequence has no events")
    require(before <= len(alone[requests[0].key]), "a sequence decodes at most its response")
    stopping = replace(requests[0], stop_tokens=frozenset({alone[requests[0].key][1][0]}))
    require(len(decode_all(make(1), [stopping])[stopping.key]) <= 2, "a stop token ends a response")


def _refuses(make: MakeEngine, requests: Sequence[DecodeRequest]) -> None:
    engine, one = make(1), requests[0]
    engine.add(one)
    _raises(ConflictError, lambda: engine.add(one), "a key is decoded once at a time")
    unknown = SequenceKey(one.key.prompt, one.key.sample, one.key.attempt + 10**6)
    _raises(NotFoundError, lambda: engine.stop(unknown), "an unknown key is named")
    _raises(NotFoundError, lambda: engine.export_sequence(unknown), "an unknown key is named")
    wrong = {
        "a prompt is not empty": replace(one, prompt_tokens=()),
        "a token is of the vocabulary": replace(one, prompt_tokens=(2**31,)),
        "a token is not negative": replace(one, prompt_tokens=(-1,)),
        "a response has a bound": replace(one, max_response_tokens=2**31),
        "a response has a token to decode": replace(one, max_response_tokens=0),
        "a temperature is not negative": replace(one, temperature=-1.0),
        "a temperature is a number": replace(one, temperature=float("nan")),
    }
    for rule, request in wrong.items():
        _raises(InputError, lambda request=request: engine.add(replace(request, key=unknown)), rule)
    require(engine.num_sequences == 1, "what was refused leaves nothing behind")
    ended: list[DecodingEnded] = []
    for _ in range(MAX_STEPS):
        ended += [event for event in engine.step() if isinstance(event, DecodingEnded)]
        if not engine.num_sequences:
            break
    require(len(ended) == 1 and ended[0].key == one.key, "a response ends once")
    require(engine.step() == [], "an engine without sequences does nothing")


def _raises(kind: type[IsthmusError], call: Callable[..., object], rule: str) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(rule)
