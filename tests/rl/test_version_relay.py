"""Rules of `VersionRelay`: versions reach all sites over the links between them, whatever is lost, slow or damaged."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.rl.relay.relay_events import (
    ChildLost,
    ChunkArrived,
    ChunksAsked,
    Coding,
    RelayEvent,
    RelayTick,
    SourceJoined,
    SourceLacks,
    SourceLost,
    Version,
    VersionOffered,
)
from isthmus.rl.relay.relay_instructions import (
    AskChunks,
    CompleteVersion,
    FailVersion,
    KeepChunk,
    RefuseChunks,
    RelayInstruction,
    SendChunk,
)
from isthmus.rl.relay.version_relay import SLOW_AFTER_S, VersionRelay

ORIGIN = "a"
NUM_VERSIONS = 3


def num_chunks(coding: Coding) -> int:
    """Return the chunks of a coding: whole ones are more."""
    return 5 if coding.base is None else 3


@dataclass
class Message:
    """Something on its way over a connection that began as number `number`."""

    event: RelayEvent
    number: int


@dataclass
class World:
    """An origin and sites, each with sources in an order; messages of a direction of a link arrive in their order."""

    sources: dict[str, tuple[str, ...]]
    damage: float = 0.0
    seed: int = 0
    now_s: float = 0.0
    relays: dict[str, VersionRelay] = field(default_factory=dict)
    links: dict[tuple[str, str], deque[Message]] = field(default_factory=dict)
    connections: dict[tuple[str, str], int] = field(default_factory=dict)
    carried: Counter[tuple[str, str, Coding, int]] = field(default_factory=Counter)
    versions: list[Version] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    kept: dict[str, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        for site in self.sources:
            self.start(site)

    def start(self, site: str) -> None:
        """Begin a site without weights."""
        for pair in [one for one in self.connections if site in one]:
            self.cut(*pair)
        self.relays[site] = VersionRelay(ORIGIN, num_chunks)
        self.kept[site] = set()

    def connect(self, source: str, child: str) -> None:
        """Open the connection over which `child` asks `source`."""
        if (source, child) in self.connections or child not in self.relays:
            return
        self.connections[source, child] = self.random.getrandbits(60)
        place = self.sources[child].index(source)
        self.give(child, SourceJoined(source=source, place=place))
        if source == ORIGIN and self.versions:
            self.offer(child)

    def cut(self, source: str, child: str) -> None:
        """Lose a connection and what is on its way."""
        if self.connections.pop((source, child), None) is None:
            return
        for ends in ((source, child), (child, source)):
            self.links.pop(ends, None)
        self.give(child, SourceLost(source=source))
        if source != ORIGIN:
            self.give(source, ChildLost(child=child))

    def publish(self) -> None:
        """Make a version and offer it to all."""
        self.versions.append(Version(len(self.versions), f"{self.random.getrandbits(60)}"))
        for source, child in self.connections:
            if source == ORIGIN:
                self.offer(child)

    def offer(self, child: str) -> None:
        """Tell a site of the newest version, beside chunks that are on their way."""
        bases = tuple(self.versions[-NUM_VERSIONS:-1])
        self.send(ORIGIN, child, VersionOffered(version=self.versions[-1], bases=bases))

    def send(self, sender: str, receiver: str, event: RelayEvent) -> None:
        """Put a message on its way, if there is a connection."""
        number = self.connections.get((sender, receiver), self.connections.get((receiver, sender)))
        if number is not None:
            self.links.setdefault((sender, receiver), deque()).append(Message(event, number))

    def deliver(self) -> bool:
        """Deliver one message of a random link; return whether there was one."""
        ready = [ends for ends, messages in self.links.items() if messages]
        if not ready:
            return False
        sender, receiver = self.random.choice(ready)
        event = self.links[sender, receiver].popleft().event
        if isinstance(event, ChunkArrived):
            has_base = event.coding.base in (None, self.relays[receiver].complete)
            is_right = event.is_right and has_base and self.random.random() >= self.damage
            event = ChunkArrived(source=sender, coding=event.coding, number=event.number, is_right=is_right)
            self.carried[sender, receiver, event.coding, event.number] += 1
        self.give(receiver, event)
        return True

    def give(self, site: str, event: RelayEvent) -> None:
        """Let a site handle an event and do what it says; the origin answers from its newest versions."""
        if site == ORIGIN:
            if isinstance(event, ChunksAsked):
                self.answer(event)
            return
        for one in self.relays[site].handle(event, self.now_s):
            self.follow(site, one)

    def answer(self, event: ChunksAsked) -> None:
        """Send what the origin can make."""
        new = self.versions[-NUM_VERSIONS:]
        if event.coding.version not in new or event.coding.base not in (None, *new):
            self.send(ORIGIN, event.child, SourceLacks(source=ORIGIN, coding=event.coding))
            return
        for number in event.numbers:
            chunk = ChunkArrived(source=ORIGIN, coding=event.coding, number=number, is_right=True)
            self.send(ORIGIN, event.child, chunk)

    def follow(self, site: str, one: RelayInstruction) -> None:
        """Do what an instruction says."""
        match one:
            case AskChunks():
                self.send(site, one.source, ChunksAsked(child=site, coding=one.coding, numbers=one.numbers))
            case SendChunk():
                self.send(
                    site, one.child, ChunkArrived(source=site, coding=one.coding, number=one.number, is_right=True)
                )
            case RefuseChunks():
                self.send(site, one.child, SourceLacks(source=site, coding=one.coding))
            case KeepChunk():
                assert one.number not in self.kept[site]
                self.kept[site].add(one.number)
            case CompleteVersion():
                assert len(self.kept[site]) in (3, 5)
                self.kept[site] = set()
            case FailVersion():
                self.failed.append(one.problem)
                self.kept[site] = set()
                self.offer(site)
            case _:
                self.kept[site] = set() if type(one).__name__ == "BeginVersion" else self.kept[site]

    def settle(self) -> None:
        """Deliver all that is on its way, with ticks until nothing more comes of them."""
        for _ in range(20):
            while self.deliver():
                pass
            self.now_s += SLOW_AFTER_S + 1
            for site in self.relays:
                self.give(site, RelayTick())

    def connect_all(self) -> None:
        """Open all connections."""
        for child, sources in self.sources.items():
            for source in sources:
                self.connect(source, child)


CHAIN = {"b": ("a",), "c": ("b", "a"), "d": ("c", "b", "a")}
RING = {"b": ("d", "c", "a"), "c": ("b", "d", "a"), "d": ("c", "b", "a")}


@pytest.mark.parametrize("seed", range(5))
def test_a_version_crosses_each_link_once(seed: int) -> None:
    """Over a chain: each site gets each chunk from its nearest source alone, once, whole first, then as changes."""
    world = World(CHAIN, seed=seed)
    world.connect_all()
    for count in range(1, 4):
        world.publish()
        while world.deliver():
            pass
        assert {one.complete for one in world.relays.values()} == {world.versions[-1]}
        assert set(world.carried.values()) == {1}
        assert {(sender, receiver) for sender, receiver, _, _ in world.carried} == {("a", "b"), ("b", "c"), ("c", "d")}
        assert len(world.carried) == 3 * (5 + 3 * (count - 1))


def test_a_chunk_is_passed_on_before_the_next_one_arrives() -> None:
    """The site at the end has the first chunk while the first site still waits for the second."""
    version = Coding(Version(0, "x"), None)
    relay = VersionRelay(ORIGIN, num_chunks)
    relay.handle(SourceJoined(source="a", place=0), 0.0)
    relay.handle(ChunksAsked(child="c", coding=version, numbers=(0, 1, 2, 3, 4)), 0.0)
    (_, asked) = relay.handle(VersionOffered(version=version.version), 0.0)
    assert asked == AskChunks(source="a", coding=version, numbers=(0, 1, 2, 3, 4))
    found = relay.handle(ChunkArrived(source="a", coding=version, number=0, is_right=True), 0.0)
    assert found == [KeepChunk(coding=version, number=0), SendChunk(child="c", coding=version, number=0)]


def test_a_late_site_catches_up_from_the_nearest() -> None:
    """It has all chunks from the site beside it, and none crosses the link of the origin again."""
    world = World(CHAIN)
    for ends in (("a", "b"), ("a", "c"), ("b", "c")):
        world.connect(*ends)
    world.publish()
    world.settle()
    world.publish()
    world.settle()
    before = sum(world.carried.values())
    world.connect_all()
    world.settle()
    new = Counter({ends[:2]: 0 for ends in world.carried})
    for sender, receiver, _, _ in world.carried:
        new[sender, receiver] += receiver == "d"
    assert (new["c", "d"], new["a", "d"]) == (5, 0)
    assert sum(world.carried.values()) == before + 5


def test_a_cut_goes_on_at_the_chunk_where_it_stopped() -> None:
    """What was kept before the cut is not sent again."""
    world = World({"b": ("a",)})
    world.connect_all()
    world.publish()
    for _ in range(5):  # the offer, the question, three chunks
        world.deliver()
    world.cut("a", "b")
    world.connect("a", "b")
    world.settle()
    assert world.relays["b"].complete == world.versions[-1]
    assert set(world.carried.values()) == {1}


def test_what_a_silent_source_owes_is_asked_of_the_next_one() -> None:
    """A source that is connected and delivers nothing holds no version up for longer than the limit."""
    world = World({"b": ("z", "a")})
    world.relays["b"].handle(SourceJoined(source="z", place=0), 0.0)
    world.connect("a", "b")
    world.publish()
    world.settle()
    assert world.relays["b"].complete == world.versions[-1]


def test_damaged_chunks_come_from_another_source_and_a_version_that_none_has_is_given_up() -> None:
    """A chunk that is damaged each time fails the version, with the names of the sources."""
    version = Version(0, "x")
    whole = Coding(version, None)
    relay = VersionRelay(ORIGIN, num_chunks)
    relay.handle(SourceJoined(source="b", place=0), 0.0)
    relay.handle(SourceJoined(source="a", place=1), 0.0)
    relay.handle(VersionOffered(version=version), 0.0)
    (again,) = relay.handle(ChunkArrived(source="b", coding=whole, number=2, is_right=False), 0.0)
    assert again == AskChunks(source="a", coding=whole, numbers=(2,))
    source, found = "a", [again]
    for _ in range(5):
        found = relay.handle(ChunkArrived(source=source, coding=whole, number=2, is_right=False), 0.0)
        if isinstance(found[0], AskChunks):
            source = found[0].source
    (failed,) = found
    assert isinstance(failed, FailVersion)
    assert "b, a" in failed.problem


@pytest.mark.parametrize("sources", [CHAIN, RING], ids=["chain", "ring"])
@given(seed=st.integers(0, 2**32), faults=st.lists(st.sampled_from("cckkpppjjdddddddtt"), max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_faults_leave_each_site_with_the_newest_version(
    sources: dict[str, tuple[str, ...]], seed: int, faults: list[str]
) -> None:
    """Cuts, killed sites, late ones and damage in any order: once they end, every site has the version of that name."""
    world = World(sources, damage=0.1, seed=seed)
    for kind in faults:
        child = world.random.choice(list(sources))
        source = world.random.choice(sources[child])
        match kind:
            case "c":
                world.cut(source, child)
            case "k":
                world.start(child)
            case "p":
                world.publish()
            case "j":
                world.connect(source, child)
            case "t":
                world.now_s += 4.0
                for site in world.relays:
                    world.give(site, RelayTick())
            case _:
                for _ in range(world.random.randrange(12)):
                    world.deliver()
    world.damage = 0.0
    world.connect_all()
    world.publish()
    world.settle()
    assert {one.complete for one in world.relays.values()} == {world.versions[-1]}
    for one in world.relays.values():
        assert one.arriving is None
