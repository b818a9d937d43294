"""The sealed link between two gateways: who may open it, what it refuses, how it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.noise import DatagramCipher, UnauthenticatedError
from isthmus.noise.datagram_cipher import WINDOW_DATAGRAMS
from isthmus.wan.gateway.sealed_link import Opened, SealedLink, SendDatagram

KEY = bytes(range(32))
HERE, THERE = ("192.0.2.1", 4790), ("198.51.100.1", 4790)


class Ends:
    """Two links; datagrams pass at once, and each is recorded."""

    def __init__(self, key: bytes = KEY) -> None:
        self.number = 0
        self.near = self.link("a", "b", THERE, KEY)
        self.far = self.link("b", "a", None, key)
        self.recorded: list[bytes] = []

    def link(self, own: str, peer: str, address: tuple[str, int] | None, key: bytes = KEY) -> SealedLink:
        """Return a link of one side."""
        return SealedLink(key, (own, peer), address, self.index)

    def index(self) -> int:
        """Return the next index."""
        self.number += 1
        return self.number

    def carry(self, datagrams: list[SendDatagram | Opened], now_s: float, *, to_far: bool) -> list[bytes]:
        """Deliver datagrams and their answers; return what was opened at either side."""
        found: list[bytes] = []
        for one in datagrams:
            if isinstance(one, Opened):
                found.append(one.content)
                continue
            self.recorded.append(one.data)
            link, source = (self.far, HERE) if to_far else (self.near, THERE)
            found += self.carry(link.receive(one.data, source, now_s), now_s, to_far=not to_far)
        return found

    def open(self, now_s: float = 0.0) -> None:
        """Let the near side dial."""
        self.carry([*self.near.tick(now_s)], now_s, to_far=True)

    def send(self, content: bytes, now_s: float, *, to_far: bool = True) -> list[bytes]:
        """Send content from one side."""
        record = (self.near if to_far else self.far).seal(content, now_s)
        return self.carry([record], now_s, to_far=to_far) if record is not None else []


def test_both_sides_send_once_the_dialler_has_proved_the_key() -> None:
    """Content passes both ways; the dialled side learns the address from the first record."""
    ends = Ends()
    assert not ends.far.is_open
    ends.open()
    assert ends.near.is_open
    assert ends.far.is_open
    assert ends.send(b"to b", 1.0) == [b"to b"]
    assert ends.send(b"to a", 1.0, to_far=False) == [b"to a"]
    assert b"to b" not in b"".join(ends.recorded)


def test_another_key_opens_nothing() -> None:
    """Neither side believes a peer without the key, and the dialled one does not answer."""
    ends = Ends(key=bytes(32))
    ends.open()
    assert len(ends.recorded) == 1
    assert not ends.near.is_open
    assert not ends.far.is_open


def test_a_recording_opens_nothing_and_repeats_nothing() -> None:
    """All datagrams of a session, replayed to both sides, deliver no content and end no session."""
    ends = Ends()
    ends.open()
    ends.send(b"once", 1.0)
    for data in list(ends.recorded):
        for link in (ends.near, ends.far):
            assert not [one for one in link.receive(data, ("203.0.113.9", 1), 2.0) if isinstance(one, Opened)]
    assert ends.send(b"still", 2.1) == [b"still"]
    assert ends.send(b"open", 2.1, to_far=False) == [b"open"]


@given(data=st.binary(max_size=120), kind=st.integers(0, 4))
def test_random_datagrams_are_refused(data: bytes, kind: int) -> None:
    """No error leaves `receive`; an open session stays."""
    ends = Ends()
    ends.open()
    for link in (ends.near, ends.far):
        assert link.receive(bytes([kind, 0, 0, 0]) + data, THERE, 1.0) == []
    assert ends.send(b"after", 1.0) == [b"after"]


@given(place=st.integers(0, 400), change=st.integers(1, 255))
def test_a_changed_record_is_refused(place: int, change: int) -> None:
    """Any bit of a record counts."""
    ends = Ends()
    ends.open()
    record = ends.near.seal(bytes(200), 1.0)
    assert record is not None
    data = bytearray(record.data)
    data[place % len(data)] ^= change
    assert ends.far.receive(bytes(data), HERE, 1.0) == []


def test_a_restarted_side_is_dialled_again() -> None:
    """The dialler notices the silence within a second and opens another session."""
    ends = Ends()
    ends.open()
    ends.far = ends.link("b", "a", None)
    now_s = 0.1
    while not ends.far.is_open and now_s < 5:
        now_s = max(now_s, ends.near.next_tick_s())
        ends.carry([*ends.near.tick(now_s)], now_s, to_far=True)
    assert now_s < 1.5
    assert ends.send(b"again", now_s, to_far=False) == [b"again"]


def test_a_flood_of_first_datagrams_is_answered_slowly_and_kept_bounded() -> None:
    """Each answer costs a key exchange: at most one in 20 ms, and an open session is untouched."""
    ends = Ends()
    ends.open()
    first = ends.recorded[0]
    answers = sum(len(ends.far.receive(first, HERE, 1 + place * 1e-3)) for place in range(200))
    assert 5 <= answers <= 11
    assert ends.send(b"fine", 1.3) == [b"fine"]


@given(st.permutations(range(40)), st.lists(st.integers(0, 39), max_size=20))
def test_a_cipher_of_datagrams_takes_each_once_in_any_order(order: list[int], again: list[int]) -> None:
    """Late is fine, twice is not."""
    sending, receiving = DatagramCipher(KEY), DatagramCipher(KEY)
    sealed = [sending.seal(bytes([number])) for number in range(40)]
    assert [receiving.open(sealed[number]) for number in order] == [bytes([number]) for number in order]
    for number in again:
        with pytest.raises(UnauthenticatedError):
            receiving.open(sealed[number])


def test_a_cipher_of_datagrams_refuses_what_is_far_behind() -> None:
    """Behind its window nothing tells a late datagram from a repeated one."""
    sending, receiving = DatagramCipher(KEY), DatagramCipher(KEY)
    sealed = [sending.seal(b"") for _ in range(WINDOW_DATAGRAMS + 1)]
    receiving.open(sealed[-1])
    assert receiving.open(sealed[1]) == b""
    with pytest.raises(UnauthenticatedError):
        receiving.open(sealed[0])
