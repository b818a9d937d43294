"""`run_program`: executes one rank's program of a collective: sends, receives and sums pieces of tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Protocol

import torch

from isthmus.strategies import Message, ProgramTurn, RankProgram

MAX_POSTED_BYTES = 64 * 2**20
"""Receives are posted ahead up to this size."""

Combine = Callable[..., torch.Tensor]
"""An elementwise operation of two tensors, such as `torch.add`, with the argument `out`."""

Block = tuple[int, torch.Tensor]
"""A flat contiguous tensor, on the CPU or where the messages carry it, and the address of its first element."""

_Posted = tuple[ProgramTurn, list[tuple[int, torch.Tensor, Future[Any]]]]


class Messages(Protocol):
    """The messages of one collective of `rank`, each with its number between sender and receiver."""

    rank: int

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Send `tensor`, flat [num_elements], which does not change afterwards."""
        ...

    def receive(self, message: Message, into: torch.Tensor) -> Future[Any]:
        """Post a receive into `into`, flat [num_elements]."""
        ...

    def wait(self, message_peer: int, future: Future[Any]) -> None:
        """Wait for a receive from `message_peer`; raises `PeerError`."""
        ...


class Codec(Protocol):
    """How messages with some peers are encoded; `elements` are a range, and how often it was sent before.

    Ranks agree on `name`.
    """

    name: str

    def crosses(self, peer: int) -> bool:
        """Return whether messages with `peer` are encoded."""
        ...

    def num_bytes(self, num_values: int) -> int:
        """Return the size of a message of `num_values`."""
        ...

    def encode(self, elements: tuple[int, int, int], value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the message for `value` [N], and what its receivers decode, [N]."""
        ...

    def decode(self, data: torch.Tensor, into: torch.Tensor) -> None:
        """Store the values of the message `data` in `into` [N]."""
        ...


def run_program(
    program: RankProgram,
    inputs: Sequence[Block],
    outputs: Sequence[Block],
    combine: Combine | None,
    messages: Messages,
    codec: Codec | None = None,
    *,
    keeps_memory: bool = False,
) -> None:
    """Execute `program`: read this rank's contributions in `inputs`, leave the results in `outputs`.

    An output may be the memory of an input at the same address. Sums are taken in ascending order of ranks. Tensors
    of the caller are copied before they are sent, because a message may be sent again until it is acknowledged,
    which is later than the end of the collective; not if the caller `keeps_memory`, with outputs apart from inputs. A
    value that `codec` encodes is replaced by what its receivers decode, so that all ranks go on with equal bits.
    """
    _Run(program, _Blocks(inputs), _Blocks(outputs), combine, messages, codec, keeps_memory=keeps_memory).run()


class _Blocks:
    """Flat tensors by address; ranges never cross the end of a block."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = sorted((block for block in blocks if block[1].numel()), key=lambda block: block[0])
        self._starts = [start for start, _ in self._blocks]

    @property
    def first(self) -> torch.Tensor | None:
        """The first block; None if there are no elements."""
        return self._blocks[0][1] if self._blocks else None

    def at(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the memory of `[start, stop)`; None if no block has it."""
        place = bisect_right(self._starts, start) - 1
        if place < 0:
            return None
        first, tensor = self._blocks[place]
        return tensor[start - first : stop - first] if stop - first <= tensor.numel() else None


class _Run:
    def __init__(
        self,
        program: RankProgram,
        inputs: _Blocks,
        outputs: _Blocks,
        combine: Combine | None,
        messages: Messages,
        codec: Codec | None,
        *,
        keeps_memory: bool,
    ) -> None:
        self._codec = codec
        self._encoded: dict[tuple[int, int], torch.Tensor] = {}
        self._num_encoded: Counter[tuple[int, int]] = Counter()
        self._keeps_memory = keeps_memory
        self._program, self._inputs, self._outputs = program, inputs, outputs
        self._combine, self._messages = combine, messages
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        self._ahead = deque(program.turns)
        self._last_turns = {turn.elements: turn for turn in program.turns}
        self._sums_in_outputs = keeps_memory and _are_disjoint(self._last_turns)
        self._posted: deque[_Posted] = deque()
        self._arriving: dict[int, torch.Tensor] = {}
        self._posted_bytes = 0
        like = next((one for one in (inputs.first, outputs.first) if one is not None), None)
        self._dtype = torch.uint8 if like is None else like.dtype
        self._device = torch.device("cpu") if like is None else like.device

    def run(self) -> None:
        self._post_ahead()
        for elements, message in self._program.first_sends:
            self._send(elements, [message])
        while self._posted:
            turn, parts = self._posted.popleft()
            for peer, tensor, future in parts:
                self._messages.wait(peer, future)
                if self._codec is not None and self._codec.crosses(peer):
                    self._codec.decode(self._arriving.pop(id(tensor)), tensor)
                self._posted_bytes -= tensor.nbytes
            self._post_ahead()
            self._encoded.pop(turn.elements, None)
            self._values[turn.elements] = self._total(turn, parts) if turn.adds else parts[0][1]
            self._send(turn.elements, turn.sends)
        for elements in self._program.results:
            self._store(elements)

    def _post_ahead(self) -> None:
        """Post the receives of the next turns, up to `MAX_POSTED_BYTES` or one turn."""
        while self._ahead and (self._posted_bytes < MAX_POSTED_BYTES or not self._posted):
            turn = self._ahead.popleft()
            parts: list[tuple[int, torch.Tensor, Future[Any]]] = []
            for message in turn.parts:
                tensor = self._target(turn, is_first=not parts)
                buffer = tensor
                if self._codec is not None and self._codec.crosses(message.peer):
                    buffer = torch.empty(self._codec.num_bytes(tensor.numel()), dtype=torch.uint8)
                    self._arriving[id(tensor)] = buffer
                parts.append((message.peer, tensor, self._messages.receive(message, buffer)))
                self._posted_bytes += tensor.nbytes
            self._posted.append((turn, parts))

    def _target(self, turn: ProgramTurn, *, is_first: bool) -> torch.Tensor:
        """Return where a part of `turn` goes: where the result is wanted, if the turn is the one that leaves it there.

        A sum is in the memory of its first part, which is the caller's only if inputs are apart from outputs.
        """
        is_result = self._last_turns.get(turn.elements) is turn
        may_use = is_result and (not turn.adds or (is_first and self._sums_in_outputs))
        target = self._outputs.at(*turn.elements) if may_use else None
        return self._new(turn.elements) if target is None else target

    def _new(self, elements: tuple[int, int]) -> torch.Tensor:
        return torch.empty(elements[1] - elements[0], dtype=self._dtype, device=self._device)

    def _held(self, elements: tuple[int, int]) -> torch.Tensor | None:
        value = self._values.get(elements)
        return self._inputs.at(*elements) if value is None else value

    def _total(self, turn: ProgramTurn, parts: Sequence[tuple[int, torch.Tensor, Future[Any]]]) -> torch.Tensor:
        """Return the own value and `parts`, combined in ascending order of ranks, in the memory of a part."""
        if self._combine is None:
            raise ValueError("a program that sums needs an operation")
        terms = [(peer, tensor) for peer, tensor, _ in parts]
        own = self._held(turn.elements)
        if own is not None:
            terms.append((self._messages.rank, own))
        terms.sort(key=lambda term: term[0])
        total = terms[0][1]
        for _, tensor in terms[1:]:
            total = self._combine(total, tensor, out=tensor if total is own else total)
        return total

    def _send(self, elements: tuple[int, int], messages: Sequence[Message]) -> None:
        if not messages:
            return
        value = self._held(elements)
        if value is None:
            raise ValueError(f"elements {elements} are sent before they are held")
        codec = self._codec
        if codec is not None and any(codec.crosses(message.peer) for message in messages):
            value = self._encode(codec, elements, value)
        shared = not self._keeps_memory and self._is_callers(elements, value)
        payload = value.clone() if shared else value
        for message in messages:
            crosses = codec is not None and codec.crosses(message.peer)
            self._messages.send(message, self._encoded[elements] if crosses else payload)

    def _encode(self, codec: Codec, elements: tuple[int, int], value: torch.Tensor) -> torch.Tensor:
        """Encode `value` once, and return what its receivers decode, which this rank holds from now on."""
        if elements not in self._encoded:
            self._encoded[elements], self._values[elements] = codec.encode(
                (*elements, self._num_encoded[elements]), value
            )
            self._num_encoded[elements] += 1
        return self._values[elements]

    def _is_callers(self, elements: tuple[int, int], value: torch.Tensor) -> bool:
        """Return whether `value` is memory of the caller."""
        blocks = (self._inputs.at(*elements), self._outputs.at(*elements))
        return any(block is not None and block.data_ptr() == value.data_ptr() for block in blocks)

    def _store(self, elements: tuple[int, int]) -> None:
        value, target = self._held(elements), self._outputs.at(*elements)
        if value is None or target is None:
            raise ValueError(f"elements {elements} of the result are not held")
        if value.data_ptr() != target.data_ptr():
            target.copy_(value)


def _are_disjoint(ranges: Iterable[tuple[int, int]]) -> bool:
    return all(one[1] <= other[0] for one, other in pairwise(sorted(ranges)))
