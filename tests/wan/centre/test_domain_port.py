"""Controllers of other operators: orders over a port that fails, kills of either side, and nothing booked twice."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from isthmus.core.errors import NotFoundError, UnavailableError
from isthmus.wan.centre.centre_client import CentreClient
from isthmus.wan.centre.centre_config import CentreConfig
from isthmus.wan.centre.centre_requests import AskMessage, LookMessage, NameMessage, PathState
from isthmus.wan.centre.domain_requests import (
    DOMAIN_REQUEST,
    DomainMessage,
    DomainReply,
    ReportMessage,
    order_message,
)
from isthmus.wan.centre.line_client import CentreAddress
from isthmus.wan.centre.logged_centre import LoggedCentre
from isthmus.wan.centre.logged_domain import LoggedDomain
from isthmus.wan.centre.run_centre import CentreServer, run_centre
from isthmus.wan.centre.run_domain import DomainServer
from isthmus.wan.control.wan_topology import PathRequest
from isthmus.wan.dial import parse_address
from tests.wan.controller.wan_lab import ladder

REMOTE = frozenset({"two", "three"})
TOKEN = "d" * 64


class PortLab:
    """A logged centre and two logged domains of other operators on a virtual clock; `fault`: share of lost calls."""

    def __init__(self, folder: Path, seed: int, fault: float) -> None:
        self.rng, self.fault, self.folder, self.now_s = Random(seed), fault, folder, 1000.0
        self.centre = LoggedCentre(ladder(), folder / "centre", REMOTE)
        self.domains = {name: self._domain(name) for name in sorted(REMOTE)}
        self.silent: set[str] = set()
        self._report_s = 0.0

    def _domain(self, name: str) -> LoggedDomain:
        return LoggedDomain(ladder(), name, self.folder / name, self.now_s)

    def kill_centre(self) -> None:
        """End the centre without a word, and start it from its log."""
        self.centre.close()
        self.centre = LoggedCentre(ladder(), self.folder / "centre", REMOTE)

    def kill_domain(self, name: str) -> None:
        """End a controller without a word, and start it from its log."""
        self.domains[name].close()
        self.domains[name] = self._domain(name)

    def say(self, message: AskMessage | NameMessage) -> PathState:
        """Pass a client's request on; return what became of it once the domains that answer have answered."""
        self.centre.handle(message, self.now_s)
        self.carry()
        return self.centre.outcome(message.name)

    def carry(self) -> None:
        """Carry orders and answers until none is left; some get lost on the way there, or back."""
        while orders := self.centre.take_orders():
            for order in orders:
                self._call(
                    order.domain, lambda domain, order=order: domain.handle(order_message(order.order), self.now_s)
                )

    def _call(self, name: str, call: Callable[[LoggedDomain], DomainReply]) -> None:
        if name in self.silent or self.rng.random() < self.fault:
            return
        reply = call(self.domains[name])
        assert self.domains[name].controller.invariants() == []
        if self.rng.random() >= self.fault:
            self.centre.domain_answered(DomainMessage(domain=name, **dict(reply)), self.now_s)

    def run(self, seconds: int) -> None:
        """Let time pass, with a report of each domain every ten seconds."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.centre.advance(self.now_s)
            if self.now_s >= self._report_s:
                self._report_s = self.now_s + 10.0
                for name in sorted(REMOTE):
                    self._call(name, lambda domain: domain.handle(ReportMessage(), self.now_s))
            self.carry()

    def kept(self, name: str) -> set[str]:
        """Return the bookings that a domain of another operator keeps."""
        return {key.name for key in self.domains[name].controller.bookings}

    def look(self, name: str) -> str:
        """Return the state of a path at the centre."""
        return self.centre.handle(LookMessage(name=name), self.now_s).state


def ask(name: str, gbps: float, end_s: float = 9e9) -> AskMessage:
    fields = {"name": name, "from": "a", "to": "d", "bandwidth_gbps": gbps, "end_s": end_s}
    return AskMessage(request=PathRequest.model_validate(fields))


def confirm(name: str) -> NameMessage:
    return NameMessage(kind="confirm", name=name)


@pytest.mark.parametrize("seed", range(6))
def test_kills_and_lost_calls_over_book_nothing(tmp_path: Path, seed: int) -> None:
    """Under lost orders and answers, kills of either side and silence, in the end each booked path is committed at
    exactly its domains, what was refused or released is kept nowhere, and no pipe is ever over-booked."""
    lab, rng = PortLab(tmp_path, seed, fault=0.2), Random(seed)
    for number in range(60):
        lab.silent = {"two"} if rng.random() < 0.1 else set()
        name = f"p{rng.randrange(12)}"
        choice = rng.random()
        if choice < 0.4:
            lab.say(ask(name, rng.choice([0.2, 0.5, 0.9])))
        elif choice < 0.7:
            lab.say(confirm(name))
        elif choice < 0.8:
            lab.say(NameMessage(kind="release", name=name))
        elif choice < 0.9:
            lab.kill_centre()
        else:
            lab.kill_domain(rng.choice(sorted(REMOTE)))
        lab.run(rng.choice([0, 1, 5, 15]))
        if number == 30:
            lab.kill_centre()
    lab.fault, lab.silent = 0.0, set()
    lab.run(1300)  # longer than all leases, holds and attempts
    records = lab.centre.served.centre.records
    booked = {name: one for name, one in records.items() if one.state == "booked"}
    assert set(records) == set(booked)
    for domain in REMOTE:
        expected = {one.key for one in booked.values() if domain in one.by_domain}
        assert set(lab.domains[domain].controller.bookings) == expected
    lab.kill_centre()
    for domain in sorted(REMOTE):
        before = lab.kept(domain)
        lab.kill_domain(domain)
        assert lab.kept(domain) == before
    lab.run(30)
    assert {name: one.key for name, one in lab.centre.served.centre.records.items()} == {
        name: one.key for name, one in booked.items()
    }


def test_a_domain_that_does_not_answer_refuses_and_what_others_kept_is_free(tmp_path: Path) -> None:
    """After the time for an answer the path is refused with the domain's name, and nothing of it is kept."""
    lab = PortLab(tmp_path, 0, fault=0.0)
    lab.silent = {"two"}
    assert lab.say(ask("one", 0.5)).state == "preparing"
    lab.run(25)
    outcome = lab.centre.outcome("one")
    assert (outcome.state, outcome.reason) == ("refused", "no answer from domain two")
    assert lab.kept("three") == set()
    lab.silent = set()
    assert lab.say(ask("one", 0.9)).state == "held"
    assert lab.say(confirm("one")).state == "booked"
    assert lab.kept("two") == {"one"}


def test_what_a_domain_uses_itself_is_refused_by_name(tmp_path: Path) -> None:
    """Of its own traffic the centre learns by the refusal, and takes the way around."""
    lab = PortLab(tmp_path, 0, fault=0.0)
    keep = ask("own", 0.8).request
    lab.say(AskMessage(request=keep))
    lab.say(confirm("own"))
    stranger = LoggedCentre(ladder(), tmp_path / "second", REMOTE)  # a second centre of the same domains
    stranger.handle(ask("more", 0.5), lab.now_s)
    orders = [one for one in stranger.take_orders() if one.domain == "two"]
    reply = lab.domains["two"].handle(order_message(orders[0].order), lab.now_s)
    stranger.domain_answered(DomainMessage(domain="two", **dict(reply)), lab.now_s)
    assert {one.domain for one in stranger.take_orders()} >= {"two", "three"}
    assert lab.domains["two"].controller.invariants() == []
    stranger.close()


def test_a_restarted_domain_answers_late_copies_as_before(tmp_path: Path) -> None:
    """A released version stays released, a committed one committed, and the start is a later one."""
    lab = PortLab(tmp_path, 0, fault=0.0)
    lab.say(ask("one", 0.4))
    lab.say(confirm("one"))
    held = order_message(_first_order(lab, "two", ask("two", 0.3)))
    lab.domains["two"].handle(held, lab.now_s)
    lab.say(NameMessage(kind="release", name="two"))
    epoch = lab.domains["two"].controller.epoch
    lab.now_s += 1
    lab.kill_domain("two")
    assert lab.domains["two"].controller.epoch > epoch
    assert lab.kept("two") == {"one"}
    assert lab.domains["two"].handle(held, lab.now_s).answer.kind == "refused"


def _first_order(lab: PortLab, domain: str, message: AskMessage):  # type: ignore[no-untyped-def]
    lab.centre.handle(message, lab.now_s)
    orders = lab.centre.take_orders()
    for one in orders:
        reply = lab.domains[one.domain].handle(order_message(one.order), lab.now_s)
        lab.centre.domain_answered(DomainMessage(domain=one.domain, **dict(reply)), lab.now_s)
    return next(one.order for one in orders if one.domain == domain)


def test_orders_and_answers_are_the_same_after_the_wire(tmp_path: Path) -> None:
    """What is sent parses to the same order, and a log that is copied at any moment gives the same centre."""
    lab = PortLab(tmp_path / "lab", 3, fault=0.0)
    for number in range(4):
        lab.centre.handle(ask(f"p{number}", 0.3), lab.now_s)
        for one in lab.centre.take_orders():
            message = order_message(one.order)
            line = '{"message":' + message.model_dump_json() + "}"
            assert DOMAIN_REQUEST.validate_json(line).message.order() == one.order  # type: ignore[union-attr]
            reply = lab.domains[one.domain].handle(message, lab.now_s)
            again = DomainReply.model_validate_json(reply.model_dump_json())
            assert again == reply
            lab.centre.domain_answered(DomainMessage(domain=one.domain, **dict(again)), lab.now_s)
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(lab.folder / "centre", tmp_path / "copy")
            copy = LoggedCentre(ladder(), tmp_path / "copy", REMOTE)
            for name in ("p0", "p1", "p2", "p3"):
                assert copy.handle(LookMessage(name=name), lab.now_s) == lab.centre.handle(
                    LookMessage(name=name), lab.now_s
                )
            copy.close()


def test_unknown_domains_are_named_before_the_start(tmp_path: Path) -> None:
    """A domain without pipes, at the centre or at a controller, and one whose port is not stated."""
    with pytest.raises(NotFoundError, match="'four'"):
        LoggedCentre(ladder(), tmp_path / "a", frozenset({"four"}))
    with pytest.raises(NotFoundError, match="'four'"):
        LoggedDomain(ladder(), "four", tmp_path / "b", 0.0)
    centre = LoggedCentre(ladder(), tmp_path / "c", REMOTE)
    with pytest.raises(UnavailableError, match="domain three"):
        run_centre(CentreConfig(listen=("127.0.0.1", 0)), centre, print, {})


@pytest.mark.integration
def test_a_centre_books_through_real_ports(tmp_path: Path) -> None:
    """A client's request is answered once both controllers have answered, and refused domains leave nothing kept."""

    async def run() -> None:
        servers, domains, addresses = [], {}, {}
        for name in sorted(REMOTE):
            domains[name] = LoggedDomain(ladder(), name, tmp_path / name, 1000.0)
            servers.append(DomainServer(CentreConfig(listen=("127.0.0.1", 0), token=TOKEN), domains[name]))
            addresses[name] = CentreAddress(address=parse_address(await servers[-1].start()), token=TOKEN)
        centre = LoggedCentre(ladder(), tmp_path / "centre", REMOTE)
        server = CentreServer(CentreConfig(listen=("127.0.0.1", 0)), centre, domains=addresses)
        client = CentreClient(CentreAddress(address=parse_address(await server.start())))
        try:
            request = ask("one", 0.7).request
            assert (await asyncio.to_thread(client.ask, request)).state == "held"
            assert (await asyncio.to_thread(client.confirm, "one")).state == "booked"
            assert (await asyncio.to_thread(client.ask, ask("two", 0.7).request)).state == "held"
            assert (await asyncio.to_thread(client.ask, ask("three", 0.7).request)).state == "refused"
            assert {name: one.num_bookings for name, one in domains.items()} == {"three": 1, "two": 2}
            assert (await asyncio.to_thread(client.release, "one")).state == "released"
        finally:
            client.close()
            await server.close()
            for one in servers:
                await one.close()
            centre.close()
            for domain in domains.values():
                domain.close()

    asyncio.run(run())
