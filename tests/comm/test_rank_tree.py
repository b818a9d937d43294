"""Rules of the tree of ranks: few neighbours, all reached, and no agreement before every rank has begun."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.comm.meeting.loss_report import MAX_REPORT_BYTES, pack_loss, unpack_loss
from isthmus.comm.meeting.rank_tree import FAN_OUT, TreePlace, rank_tree
from isthmus.comm.meeting.tree_wave import Signal, TreeWave
from isthmus.core.errors import PeerError, RestartError

clusters_of_ranks = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def places_of(clusters: list[int]) -> list[TreePlace]:
    return [rank_tree(clusters, rank) for rank in range(len(clusters))]


@given(clusters_of_ranks)
def test_the_tree_reaches_every_rank_with_few_neighbours_each(clusters: list[int]) -> None:
    """Each rank but the first has one parent, of a lower rank, which knows it; clusters are joined by C - 1 links."""
    places = places_of(clusters)
    links = [(place.parent, rank) for rank, place in enumerate(places) if place.parent is not None]
    assert len(links) == len(clusters) - 1
    assert all(parent < rank for parent, rank in links)
    assert sorted(links) == sorted((rank, child) for rank, place in enumerate(places) for child in place.children)
    assert max(len(place.neighbours) for place in places) <= 2 * FAN_OUT + 1
    assert sum(clusters[parent] != clusters[rank] for parent, rank in links) == len(set(clusters)) - 1


def test_the_tree_of_512_ranks_is_six_links_deep() -> None:
    """A rank of a large cluster has as many neighbours as one of a small cluster."""
    places = places_of([0] * 512)
    depths = [0]
    for place in places[1:]:
        depths.append(depths[place.parent] + 1)
    assert max(depths) == math.ceil(math.log(512, FAN_OUT)) == 6


@given(clusters_of_ranks, st.data())
def test_all_ranks_agree_after_the_last_one_has_begun_and_never_before(
    clusters: list[int], data: st.DataObject
) -> None:
    """Ranks begin and signals arrive in any order, some twice: none is done before all have begun; then all are."""
    places = places_of(clusters)
    waves = [TreeWave(place, calls=False) for place in places]
    waiting, under_way = set(range(len(clusters))), list[tuple[int, int, Signal]]()
    while waiting or under_way:
        choices = len(waiting) + len(under_way)
        choice = data.draw(st.integers(0, choices - 1))
        if choice < len(waiting):
            rank = sorted(waiting)[choice]
            waiting.remove(rank)
            signals = waves[rank].begin()
        else:
            sender, rank, signal = under_way[choice - len(waiting)]
            if not data.draw(st.booleans()):  # else it arrives once more
                under_way.pop(choice - len(waiting))
            signals = waves[rank].receive(sender, signal)
        under_way += [(rank, to, signal) for to, signal in signals]
        assert not waiting or not any(wave.is_done for wave in waves)
    assert all(wave.is_done and wave.missing == () for wave in waves)


@given(clusters_of_ranks, st.data())
def test_one_rank_s_call_is_answered_for_all_unless_one_is_dead(clusters: list[int], data: st.DataObject) -> None:
    """All living ranks are asked; all are done if and only if every rank lives."""
    places = places_of(clusters)
    waves = [TreeWave(place, calls=True) for place in places]
    caller = data.draw(st.integers(0, len(clusters) - 1))
    dead = data.draw(st.sampled_from([None, *(rank for rank in range(len(clusters)) if rank != caller)]))
    under_way = [(caller, *one) for one in waves[caller].begin()]
    while under_way:
        sender, rank, signal = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        if rank != dead:
            under_way += [(rank, *one) for one in waves[rank].receive(sender, signal)]
        assert rank in places[sender].neighbours
    living = [wave for rank, wave in enumerate(waves) if rank != dead]
    assert [wave.is_done for wave in living] == [dead is None] * len(living)
    if dead is not None:
        beside = [rank for rank in places[dead].neighbours if waves[rank].has_begun]
        assert any(dead in waves[rank].missing for rank in beside)


@pytest.mark.parametrize("signal", list(Signal))
def test_a_signal_that_does_not_fit_the_tree_changes_nothing(signal: Signal) -> None:
    """A rank that is no neighbour, or says what its place cannot know, neither begins nor ends anything."""
    for sender in (2, 7):
        wave = TreeWave(TreePlace(0, (4, 5)), calls=True)
        assert wave.receive(sender, signal) == []
        assert not wave.has_begun
    wave = TreeWave(TreePlace(0, (4, 5)), calls=False)
    wave.begin()
    assert wave.receive(0, Signal.DONE) == []
    assert wave.receive(0, Signal.READY) == []
    assert not wave.is_done


@given(st.text(), st.none() | st.text(), st.none() | st.integers(0, 2**63 - 1))
def test_a_loss_report_keeps_kind_incarnation_and_beginning(
    text: str, hint: str | None, incarnation: int | None
) -> None:
    """The error arrives as it was, but for long texts, which are cut, and text that UTF-8 cannot hold."""
    error = PeerError(text, hint=hint)
    if incarnation is not None:
        error = RestartError(text, incarnation=incarnation, hint=hint)
    report = pack_loss(error)
    assert len(report) <= MAX_REPORT_BYTES
    found = unpack_loss(report)
    assert type(found) is type(error)
    assert found.message == text[:300].encode(errors="replace").decode()
    assert getattr(found, "incarnation", None) == incarnation


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"\xff",
        b"[" * 4000,
        b"7",
        b"{}",
        json.dumps({"message": 7, "hint": None, "incarnation": None}).encode(),
        json.dumps({"message": "x", "hint": [], "incarnation": None}).encode(),
        *(json.dumps({"message": "x", "hint": None, "incarnation": n}).encode() for n in (-1, 2**63, True, 1.5, "1")),
        json.dumps({"message": "x", "hint": None, "incarnation": None, "more": 1}).encode(),
    ],
)
def test_a_malformed_loss_report_is_an_error(report: bytes) -> None:
    """It ends the connection, like any malformed frame."""
    with pytest.raises(ValueError):
        unpack_loss(report)
