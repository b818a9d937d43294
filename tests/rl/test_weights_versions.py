"""Rules of versions of weights: their names and chunks, and the connections over which they cross."""

from __future__ import annotations

import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError, ProtocolError
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from isthmus.rl.process.relay_ranks import relay_ranks
from isthmus.rl.relay.chunk_table import DIGEST_BYTES, PIECE_ELEMENTS, ChunkTable
from isthmus.rl.relay.relay_events import Coding, Version
from isthmus.rl.rollout.chunk_sender import ChunkSender
from isthmus.rl.rollout.message_link import MessageLink
from isthmus.rl.rollout.weights_exchange import (
    ORIGIN,
    RelaySource,
    Staged,
    WeightsExchange,
    asked_numbers,
)
from isthmus.rl.rollout.wire_messages import (
    RelayGreeting,
    VersionOffer,
    WeightsAsked,
    WeightsChunk,
    WeightsLacking,
    unpack_message,
)
from isthmus.rl.versions.version_store import VersionStore
from isthmus.rl.versions.weights_receiver import WeightsReceiver
from isthmus.rl.versions.weights_stream import PolicyVersion

LIMIT_S = 30.0
SHAPES = {"a": torch.Size((50, 40)), "b": torch.Size((7,)), "e": torch.Size((0,))}


def versions(dtype: torch.dtype) -> tuple[PolicyVersion, PolicyVersion]:
    """Return two versions of which a tenth of the weights differ."""
    made = torch.Generator().manual_seed(1)
    old = {name: torch.randn(shape, generator=made).to(dtype) for name, shape in SHAPES.items()}
    new = {name: torch.where(torch.rand(one.shape, generator=made) < 0.1, one * 1.01, one) for name, one in old.items()}
    return PolicyVersion(3, old), PolicyVersion(4, {name: one.to(dtype) for name, one in new.items()})


def coding_of(store: VersionStore, receiver: WeightsReceiver) -> Coding:
    """Let the receiver begin the newest version; return its coding."""
    offer, digests = store.newest()
    receiver.learn(offer.version, digests)
    coding = Coding(offer.version, receiver.version if receiver.version in offer.bases else None)
    receiver.begin(coding)
    return coding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_versions_cross_without_loss_and_in_few_bytes(dtype: torch.dtype) -> None:
    """Whole first, then as changes; 16-bit floats take less than a quarter of the bytes."""
    store, receiver, sizes = VersionStore(2), WeightsReceiver(SHAPES, dtype), []
    for version in versions(dtype):
        store.add(version)
        coding = coding_of(store, receiver)
        size = 0
        for number in range(store.num_chunks(coding)):
            chunk = store.chunk(coding, number)
            assert chunk is not None
            bits = receiver.decode(coding, number, *chunk)
            assert bits is not None
            receiver.keep(coding, number, bits, *chunk)
            kind, content = receiver.chunk(coding, number)
            assert (kind, bytes(memoryview(content))) == chunk
            size += len(chunk[1])
        found = receiver.complete(coding.version)
        assert all(torch.equal(found[name], one) for name, one in version.tensors.items())
        assert PolicyVersion(version.step, found).version == version.version
        whole = Coding(coding.version, None)
        sent = receiver.chunk(whole, 0)
        assert (sent[0], bytes(memoryview(sent[1]))) == store.chunk(whole, 0)
        sizes.append(size)
    assert dtype == torch.float32 or sizes[1] < sizes[0] / 4


def test_what_is_damaged_is_not_taken() -> None:
    """Altered and short chunks, another base, places outside the model, digests of another name."""
    old, new = versions(torch.bfloat16)
    store, receiver = VersionStore(2), WeightsReceiver(SHAPES, torch.bfloat16)
    store.add(old)
    whole = coding_of(store, receiver)
    kind, content = store.chunk(whole, 0) or ("full", b"")
    for wrong in (content[:-2], content[:-1], bytes([content[0] ^ 1]) + content[1:], b""):
        assert receiver.decode(whole, 0, kind, wrong) is None
    for number in (-1, 99):
        assert receiver.decode(whole, number, kind, content) is None
    assert receiver.decode(whole, 0, "changes", content) is None
    assert receiver.decode(Coding(new.version, None), 0, kind, content) is None
    assert receiver.decode(whole, 0, kind, content) is not None
    with pytest.raises(InputError, match="another name"):
        receiver.learn(new.version, old.digests)
    with pytest.raises(InputError, match="another name"):
        receiver.learn(old.version, old.digests[:-1])


def test_a_store_names_what_it_no_longer_has() -> None:
    """Versions beyond those kept, versions of steps that were trained again, and unknown bases have no chunks."""
    store = VersionStore(2)
    old, new = versions(torch.bfloat16)
    store.add(old)
    store.add(new)
    coding = Coding(new.version, old.version)
    assert store.num_chunks(coding) == 3
    again = PolicyVersion(4, old.tensors)
    store.add(again)
    assert store.num_chunks(coding) == 0
    assert store.chunk(coding, 0) is None
    assert store.num_chunks(Coding(again.version, Version(2, "x"))) == 0
    assert store.chunk(Coding(again.version, old.version), 3) is None


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 6 * PIECE_ELEMENTS), max_size=4))
def test_chunks_cover_each_element_once(counts: dict[str, int]) -> None:
    """Both ways, in the same order of pieces, and a chunk of changes begins where a piece does."""
    table = ChunkTable(counts)
    version = Version(0, "x")
    for coding in (Coding(version, None), Coding(version, version)):
        covered: dict[str, int] = {}
        piece = 0
        for one in table.chunks(coding):
            assert (one.first, one.start) == (piece, covered.get(one.name, 0))
            covered[one.name] = one.start + one.num_elements
            piece += one.num_pieces
        assert covered == counts
        assert piece == len(table.pieces)


@pytest.mark.parametrize("ranges", [((3, 2),), ((0, 2), (1, 3)), ((-1, 2),)])
def test_questions_for_chunks_are_bounded(ranges: tuple[tuple[int, int], ...]) -> None:
    """Ranges rise, and what is beyond the last chunk is left out, however far it goes."""
    coding = Coding(Version(0, "x"), None)
    with pytest.raises(ProtocolError):
        asked_numbers(WeightsAsked(coding=coding, ranges=ranges), 5)
    assert asked_numbers(WeightsAsked(coding=coding, ranges=((1, 2), (4, 10**18))), 5) == (1, 4)


def test_each_cluster_is_asked_once() -> None:
    """The first rank of a cluster asks other clusters, the others of it ask that one."""
    b, c = RolloutPlace(cluster="b", node_group="x"), RolloutPlace(cluster="c", node_group="x", sources=("b", "gone"))
    assert [relay_ranks((b, b, c, c), number, 2) for number in range(4)] == [(), (2,), (2,), (4, 2)]


class Site:
    """An exchange of one site, and its connection to an origin that answers from a store."""

    def __init__(self, name: str, store: VersionStore, damage: Callable[[bytes], bytes] = bytes) -> None:
        self.staged: queue.Queue[Staged | None] = queue.Queue()
        self.exchange = WeightsExchange("run", name, WeightsReceiver(SHAPES, torch.bfloat16), self.staged)
        self.store, self.damage, self.num_sent = store, damage, 0
        ours, theirs = socket.socketpair()
        self.links = MessageLink.dialled(ours, None, "x"), MessageLink.accepted(theirs, None)
        self.senders = tuple(ChunkSender(link, name) for link in self.links)

    def open(self, sources: tuple[RelaySource, ...]) -> None:
        """Begin to take weights in."""
        for sender in self.senders:
            sender.start()
        self.exchange.start(sources)
        self.exchange.join_origin(self.senders[1])
        for target in (self.answer, self.read):
            threading.Thread(target=target, daemon=True).start()

    def offer(self) -> None:
        """Offer the newest version of the store."""
        offer, digests = self.store.newest()
        message = VersionOffer(version=offer.version, bases=offer.bases)
        self.senders[0].send_chunk(lambda: (message, digests))

    def answer(self) -> None:
        """Send what the site asks the origin for."""
        with suppress(OSError):
            while True:
                message = unpack_message(self.links[0].receive()[0])
                if isinstance(message, WeightsAsked):
                    count = self.store.num_chunks(message.coding)
                    for number in asked_numbers(message, count):
                        self.senders[0].send_chunk(partial(self.make, message.coding, number))

    def make(self, coding: Coding, number: int) -> tuple[WeightsChunk | WeightsLacking, bytes]:
        """Return a chunk of the store, perhaps damaged."""
        found = self.store.chunk(coding, number)
        if found is None:
            return WeightsLacking(coding=coding), b""
        self.num_sent += 1
        return WeightsChunk(coding=coding, number=number, kind=found[0]), self.damage(found[1])

    def read(self) -> None:
        """Take in what the origin sends."""
        with suppress(OSError):
            while True:
                header, content = self.links[1].receive()
                self.exchange.take(ORIGIN, unpack_message(header), content)

    def dial(self) -> socket.socket:
        """Open a connection of another site to this one."""
        ours, theirs = socket.socketpair()
        threading.Thread(target=self.serve, args=(theirs,), daemon=True).start()
        return ours

    def serve(self, sock: socket.socket) -> None:
        """Answer another site."""
        link = MessageLink.accepted(sock, None)
        greeting = unpack_message(link.receive()[0])
        assert isinstance(greeting, RelayGreeting)
        self.exchange.serve(link, greeting.name)


@contextmanager
def two_sites(store: VersionStore, damage: Callable[[bytes], bytes] = bytes) -> Iterator[tuple[Site, Site]]:
    """Yield two sites, of which the second asks the first before the origin, which damages what it sends to it."""
    b, c = Site("b", store), Site("c", store, damage)
    b.open(())
    c.open((RelaySource(name="b", cluster="b", dial=b.dial),))
    try:
        yield b, c
    finally:
        for site in (b, c):
            site.exchange.close()
            for sender, link in zip(site.senders, site.links, strict=True):
                sender.close(LIMIT_S)
                link.close()


def check_staged(site: Site, version: PolicyVersion) -> None:
    """Require that the site has a version, bit for bit."""
    staged = site.staged.get(timeout=LIMIT_S)
    assert staged is not None
    assert (staged.version, staged.problem) == (version.version, "")
    assert all(torch.equal(staged.tensors[name], one) for name, one in version.tensors.items())


def test_a_site_passes_versions_on_and_the_origin_sends_them_once() -> None:
    """Whole and as changes; the bytes from the relay are counted."""
    store = VersionStore(3)
    with two_sites(store) as (b, c):
        for version in versions(torch.bfloat16):
            store.add(version)
            for site in (b, c):
                site.offer()
            for site in (b, c):
                check_staged(site, version)
        assert (b.num_sent, c.num_sent) == (6, 0)
        received, sent = c.exchange.take_relayed()["b"]
        assert received > 2000 * 2
        assert sent > 0
        assert c.exchange.take_relayed() == {}


def test_an_origin_that_damages_each_chunk_is_named() -> None:
    """A site alone with an origin that damages each chunk says so, and takes the next version undamaged."""
    chance = random.Random(3)
    store = VersionStore(3)
    old, new = versions(torch.bfloat16)
    harm = [True]

    def damage(content: bytes) -> bytes:
        return bytes([content[0] ^ (1 + chance.randrange(255))]) + content[1:] if content and harm[0] else content

    site = Site("b", store, damage)
    site.open(())
    store.add(old)
    site.offer()
    staged = site.staged.get(timeout=LIMIT_S)
    assert staged is not None
    assert "no undamaged chunks" in staged.problem
    harm[0] = False
    store.add(new)
    site.offer()
    check_staged(site, new)
    site.exchange.close()
    for sender, link in zip(site.senders, site.links, strict=True):
        sender.close(LIMIT_S)
        link.close()


def test_the_digests_of_a_version_are_one_for_each_piece() -> None:
    """An empty tensor has a piece too."""
    assert len(versions(torch.bfloat16)[0].digests) == 3 * DIGEST_BYTES
