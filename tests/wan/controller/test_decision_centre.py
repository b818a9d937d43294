"""The centre and its domains: a path everywhere or nowhere, moved when it fails, whatever messages are lost."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import IllegalTransitionError, NotFoundError
from isthmus.wan.control.wan_topology import WanTopology
from isthmus.wan.controller.booking_record import BookingRecord
from isthmus.wan.controller.controller_messages import (
    BookingKey,
    CommitSpans,
    ConfirmPath,
    DomainReport,
    FromDomain,
    PrepareSpans,
    ReleasePath,
    ReleaseSpans,
    RenewHold,
    SpansCommitted,
    SpansPrepared,
    SpansRefused,
)
from isthmus.wan.controller.domain_controller import DomainController
from isthmus.wan.controller.pipe_bookings import PipeSpan
from isthmus.wan.controller.wan_network import WanNetwork
from tests.wan.control.test_wan_control import random_request, random_topology
from tests.wan.controller.wan_lab import WanLab, ask, ladder, pipe, send

FOREVER_S = 1e18


def test_a_path_is_promised_once_all_its_domains_have_committed() -> None:
    """The client hears of it after two round trips, and both domains keep it."""
    lab = WanLab(ladder())
    lab.ask(ask())
    assert lab.told == []
    lab.run(0.1)
    assert lab.told == [("r", "booked")]
    assert lab.committed("r") == {"one", "two"}


def test_a_hold_is_kept_until_it_is_confirmed() -> None:
    """As a party of a two-phase commit the centre prepares, waits, and commits when told."""
    lab = WanLab(ladder())
    lab.ask(ask(), holds=True)
    lab.run(15.0)
    assert (lab.state("r"), lab.committed("r")) == ("held", set())
    lab.give(ConfirmPath("r"))
    lab.run(0.1)
    assert (lab.state("r"), lab.committed("r")) == ("booked", {"one", "two"})


def test_an_aborted_or_forgotten_hold_leaves_nothing() -> None:
    """Released by its client, or neither confirmed nor renewed in time: all domains are free again."""
    lab = WanLab(ladder())
    lab.ask(ask("one"), holds=True)
    lab.ask(ask("two"), holds=True)
    lab.run(1.0)
    lab.give(ReleasePath("one"))
    lab.run(15.0)
    lab.give(RenewHold("two"))
    lab.run(15.0)
    assert (lab.state("one"), lab.state("two")) == ("released", "held")
    lab.run(20.0)
    assert lab.state("two") == "refused"
    assert "confirmed" in lab.reasons["two"]
    assert all(list(one.bookings) == [] for one in lab.domains.values())


def test_a_domain_that_uses_its_pipe_itself_is_planned_around() -> None:
    """The domain decides: its refusal leads to another path, and the first one is released where it was granted."""
    lab = WanLab(ladder())
    assert lab.domains["one"].book_own("own", (PipeSpan("ab", 0.0, FOREVER_S, 800_000),), "training")
    lab.ask(ask())
    lab.run(1.0)
    assert lab.state("r") == "booked"
    assert lab.committed("r") == {"two", "three"}
    assert lab.domains["two"].bookings.free_kbps("bd", 0.0, 1.0, "training") == 1_000_000


def test_a_silent_domain_ends_the_attempt_and_not_the_others() -> None:
    """Without an answer the request is refused with the domain's name, and what others had prepared is free."""
    lab = WanLab(ladder())
    lab.silent.add("two")
    lab.ask(ask())
    lab.run(60.0)
    assert lab.state("r") == "refused"
    assert "two" in lab.reasons["r"]
    assert list(lab.domains["one"].bookings) == []


def test_bookings_move_away_from_a_pipe_that_fails_training_first() -> None:
    """Where the other path has room for one of two, the training flow gets it, and bulk is told so."""
    lab = WanLab(ladder())
    for request in (ask("bulk", 0.4, service="bulk"), ask("train", 0.6)):
        lab.ask(request)
        lab.run(1.0)
    assert lab.domains["three"].book_own("own", (PipeSpan("ac", 0.0, FOREVER_S, 300_000),), "training")
    lab.centre.view.book("own", (PipeSpan("ac", 0.0, FOREVER_S, 300_000),), "training")
    lab.fail("one", "ab")
    lab.run(1.0)
    assert (lab.state("train"), lab.committed("train")) == ("moved", {"two", "three"})
    assert (lab.state("bulk"), lab.committed("bulk")) == ("broken", set())
    assert lab.domains["one"].bookings.bookings_on("ab") == []


def test_training_displaces_bulk_and_bulk_displaces_nothing() -> None:
    """Transfers that are in the way of training are planned again, later, by their deadline."""
    lab = WanLab(WanTopology(pipes=(pipe("ad", "ad"),), bulk_share=1.0))
    lab.ask(send("t", 10**9, 100.0))
    lab.run(2.0)
    lab.ask(ask("train", 0.9, end_s=50.0))
    lab.run(1.0)
    assert (lab.state("train"), lab.state("t")) == ("booked", "moved")
    plan = lab.centre.records["t"].plan
    assert plan is not None
    assert [kbps for _, _, kbps in plan.rates_kbps] == [100_000, 1_000_000]
    lab.ask(send("late", 10**9, 30.0))
    lab.run(1.0)
    assert (lab.state("late"), lab.state("train")) == ("refused", "booked")


def test_a_booking_without_another_path_is_broken_until_there_is_one() -> None:
    """The client is told when its path is gone and when it is back; nobody else gets its domains meanwhile forever."""
    lab = WanLab(WanTopology(pipes=(pipe("ab", "ab"), pipe("bd", "bd", domain="two"))))
    lab.ask(ask())
    lab.run(1.0)
    lab.fail("two", "bd")
    lab.run(20.0)
    assert lab.state("r") == "broken"
    lab.fail("two", "bd", False)
    lab.run(10.0)
    assert (lab.state("r"), lab.committed("r")) == ("moved", {"one", "two"})


def test_a_domain_that_restarts_with_an_empty_table_gets_its_bookings_again() -> None:
    """Its report shows what it has lost; paths are planned and committed again, and never over-booked."""
    lab = WanLab(ladder())
    lab.ask(ask())
    lab.run(1.0)
    lab.restart("two")
    lab.run(1.0)
    assert (lab.state("r"), lab.committed("r")) == ("moved", {"one", "two"})


def test_a_moved_transfer_sends_the_rest() -> None:
    """What was sent before the failure counts; the new plan has the remaining bytes, by the same deadline."""
    lab = WanLab(ladder())
    lab.ask(send("t", 10**9, 40.0))
    lab.run(8.0)
    lab.fail("one", "ab")
    lab.run(1.0)
    record = lab.centre.records["t"]
    assert record.plan is not None
    assert lab.state("t") == "moved"
    assert record.sent_kbits == pytest.approx(500_000 * 8.01, rel=1e-3)
    rest_kbits = sum((end_s - start_s) * kbps for start_s, end_s, kbps in record.plan.rates_kbps)
    assert record.sent_kbits + rest_kbits == pytest.approx(8e6, rel=1e-6)


def test_a_transfer_that_is_done_ends_and_is_not_planned_again() -> None:
    """Its domains free it with its last byte, long before the deadline; their reports bring nothing back."""
    lab = WanLab(ladder())
    lab.ask(send("t", 10**9, 400.0))
    lab.run(60.0)
    assert lab.told == [("t", "booked"), ("t", "released")]
    assert lab.centre.records == {}
    assert all(list(one.bookings) == [] for one in lab.domains.values())


def test_a_domain_speaks_for_its_own_pipes_only() -> None:
    """A report that names another domain's pipe, or keys of others, and a domain that is unknown, change nothing."""
    lab = WanLab(ladder())
    lab.ask(ask())
    lab.run(1.0)
    key = lab.centre.records["r"].key
    for domain in ("three", "nowhere"):
        report = DomainReport(down=("ab", "bd"), prepared=(), committed=(key,))
        lab.give(FromDomain(domain, 9, 9, report))
        lab.give(FromDomain(domain, 9, 10, SpansRefused(key=key, pipe="ab", reason="")))
    lab.run(1.0)
    assert lab.told == [("r", "booked")]
    assert lab.committed("r") == {"one", "two"}


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.3]))
def test_every_request_ends_everywhere_or_nowhere(seed: int, fault: float) -> None:
    """Random networks, failures, restarts, holds, messages lost, repeated and late: nothing is ever over-booked; in the
    end each booked path is committed at exactly its domains, and nothing else is kept anywhere."""
    rng = Random(seed)
    lab = WanLab(random_topology(rng), seed, fault)
    names = []
    for number in range(12):
        request = random_request(rng, number).model_copy(update={"end_s": FOREVER_S})
        names.append(request.name)
        lab.ask(request, holds=rng.random() < 0.3)
        lab.run(rng.uniform(0.0, 4.0))
        domain = rng.choice(sorted(lab.domains))
        pipes = sorted(lab.domains[domain].bookings.capacity_kbps)
        if rng.random() < 0.2:
            lab.fail(domain, rng.choice(pipes), rng.random() < 0.7)
        if rng.random() < 0.1:
            lab.restart(domain)
        if rng.random() < 0.4:
            lab.give(rng.choice([ConfirmPath, ReleasePath])(rng.choice(names)))
    lab.fault = 0.0
    lab.run(400.0)
    for name, record in lab.centre.records.items():
        assert record.state in ("booked", "broken"), name
        assert lab.committed(name) == set(record.by_domain)
        for domain, spans in record.by_domain.items():
            assert lab.domains[domain].bookings.spans_of(record.key) == spans
            assert not lab.domains[domain].bookings.down.intersection(span.pipe for span in spans)
    booked = {record.key for record in lab.centre.records.values() if record.plan is not None}
    for one in lab.domains.values():
        assert set(one.bookings) <= booked
    assert set(lab.centre.view) == booked
    assert lab.centre.view.over_booked() == []


def controller() -> DomainController:
    return DomainController(WanNetwork(ladder()), "one", 1)


def prepare(version: int = 1, kbps: int = 600_000, name: str = "r", pipe_name: str = "ab") -> PrepareSpans:
    spans = (PipeSpan(pipe_name, 0.0, 50.0, kbps),)
    return PrepareSpans(key=BookingKey(name, version), spans=spans, service="training", lease_s=10.0)


def test_a_lease_that_ends_frees_what_was_prepared_and_a_late_commit_is_refused() -> None:
    """Renewed by a repeated order; committed in time it stays until its spans are over."""
    one = controller()
    for now_s in (0.0, 9.0):
        assert isinstance(one.handle(prepare(), now_s).answer, SpansPrepared)
    assert isinstance(one.handle(prepare(1, name="other"), 18.0).answer, SpansRefused)
    assert isinstance(one.handle(prepare(1, name="other"), 19.0).answer, SpansPrepared)
    assert isinstance(one.handle(CommitSpans(BookingKey("r", 1)), 19.0).answer, SpansRefused)
    assert isinstance(one.handle(CommitSpans(BookingKey("other", 1)), 20.0).answer, SpansCommitted)
    assert one.report(49.0).answer.committed == (BookingKey("other", 1),)  # type: ignore[union-attr]
    assert one.report(50.0).answer.committed == ()  # type: ignore[union-attr]
    assert one.invariants() == []


def test_late_copies_of_orders_bring_nothing_back() -> None:
    """After a release the same version is not prepared again; a higher one is."""
    one = controller()
    one.handle(prepare(3), 0.0)
    one.handle(ReleaseSpans(BookingKey("r", 3)), 1.0)
    assert isinstance(one.handle(prepare(2), 2.0).answer, SpansRefused)
    assert isinstance(one.handle(prepare(3), 2.0).answer, SpansRefused)
    assert isinstance(one.handle(prepare(4), 2.0).answer, SpansPrepared)
    one.handle(ReleaseSpans(BookingKey("r", 3)), 3.0)
    assert BookingKey("r", 4) in one.bookings


@pytest.mark.attack
@pytest.mark.parametrize(
    ("order", "said"),
    [
        (prepare(pipe_name="bd"), "no pipe of domain one"),
        (prepare(kbps=-5), "free"),
        (prepare(kbps=0), "free"),
        (prepare(kbps=10**30), "free"),
        (PrepareSpans(key=BookingKey("r", 1), spans=(), service="bulk", lease_s=1e300), "0 spans"),
        (
            PrepareSpans(
                key=BookingKey("r", 1), spans=(PipeSpan("ab", 5.0, 5.0, 1),), service="training", lease_s=-1.0
            ),
            "free",
        ),
        (CommitSpans(BookingKey("r", 1)), "nothing is prepared"),
    ],
)
def test_a_wrong_centre_over_books_nothing(order: PrepareSpans, said: str) -> None:
    """Orders for other domains' pipes, of no or endless rates, or without a time, are refused and leave nothing."""
    one = controller()
    answer = one.handle(order, 0.0).answer
    assert isinstance(answer, SpansRefused)
    assert said in answer.reason
    assert list(one.bookings) == []
    assert one.invariants() == []


def test_a_domain_knows_its_own_pipes_only() -> None:
    """A failure of a pipe elsewhere is an error."""
    with pytest.raises(NotFoundError):
        controller().set_down("bd", True)


def test_an_illegal_transition_names_the_booking() -> None:
    """No state follows the end."""
    record = BookingRecord(request=ask(), holds=False)
    record.move_to("ended")
    with pytest.raises(IllegalTransitionError, match="booking r, version 0"):
        record.move_to("booked")
