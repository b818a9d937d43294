"""Experts that engines report with tokens: `routing_problem`, `join_routing` and `unpack_routing`.

Source: rollout routing replay (arXiv 2510.11370): where training takes the experts that the engine took, a router that
rounds otherwise near a tie does not make another policy of it. A row has the experts of one token of a sequence, prompt
included; the last token of a sequence has none, as it is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from isthmus.core.model_parts.routing_shape import RoutingShape


def routing_problem(shape: RoutingShape | None, routing: bytes, end: int, most: int) -> str:
    """Return why `routing` cannot be the experts of the tokens before token `end` of a sequence, or "".

    Up to `most` of the first tokens may be without: theirs are known.
    """
    if shape is None:
        return f"{len(routing)} bytes of routing, which this run does not replay" if routing else ""
    num_rows, rest = divmod(len(routing), shape.row_bytes)
    if rest or num_rows > end:
        return f"{len(routing)} bytes of routing for {end} tokens, each of {shape.row_bytes}"
    if end - num_rows > most:
        return f"no routing of tokens {most} to {end - num_rows}"
    experts = _rows(shape, routing)
    if experts.size and int(experts.max()) >= shape.num_experts:
        return f"expert {int(experts.max())} of {shape.num_experts}"
    ranked = np.sort(experts, axis=-1)
    if bool((ranked[..., 1:] == ranked[..., :-1]).any()):
        return "a token that takes an expert twice"
    return ""


def join_routing(kept: bytearray, routing: bytes, reported: int, recorded: int, row_bytes: int) -> None:
    """Append to `kept` what is new in `routing`, the experts before token `reported`, as far as token `recorded`."""
    begin = reported - len(routing) // row_bytes
    have = len(kept) // row_bytes
    kept += routing[max(have - begin, 0) * row_bytes : max(recorded - begin, 0) * row_bytes]


def unpack_routing(shape: RoutingShape, rows: Sequence[bytes | bytearray], length: int) -> torch.Tensor:
    """Return the experts of some sequences, [sequences, `length`, layers, experts of a token] int16; -1 for none."""
    found = torch.full((len(rows), length, shape.num_layers, shape.num_chosen), -1, dtype=torch.int16)
    for number, one in enumerate(rows):
        experts = torch.from_numpy(_rows(shape, one).astype(np.int16))[:length]
        found[number, : len(experts)] = experts
    return found


def _rows(shape: RoutingShape, content: bytes | bytearray) -> np.ndarray:
    """Return experts [rows, layers, experts of a token]."""
    return np.frombuffer(content, dtype=shape.number_type).reshape(-1, shape.num_layers, shape.num_chosen)
