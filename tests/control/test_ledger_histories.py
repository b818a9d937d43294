"""Random histories of holdings, prices, losses, absences and proofs: the ledger balances, and is a function of them."""

from __future__ import annotations

import copy
import random
from fractions import Fraction
from typing import NamedTuple

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.control.accounting.check_ledger import check_ledger
from isthmus.control.accounting.holdings import Holding
from isthmus.control.accounting.make_statement import make_statement, open_transactions
from isthmus.control.accounting.meter import Meter
from isthmus.control.store.column_codec import column_codec
from isthmus.core.errors import ConflictError, FieldError
from isthmus.core.views.ledger_views import PartyKind
from tests.control.priced import chip_price, hold, holding, tariff

JOBS, SITES = ("j1", "j2", "j3"), ("a", "b")
MINUTE_S, MONTH_S = 60.0, 31 * 86_400.0
OWNERS = tuple(f"owner-{site}" for site in SITES)


class Step(NamedTuple):
    """What happens: a kind and a seed for its details."""

    kind: str
    seed: int


KINDS = ("wait", "hold", "hold", "hold", "release", "checkpoint", "lose", "prove", "price", "end", "back")
STEPS = st.lists(st.builds(Step, st.sampled_from(KINDS), st.integers(0, 2**32)), max_size=60)


class Played:
    """A meter that plays steps, and what was held at which price, counted in minutes by other means."""

    def __init__(self) -> None:
        self.meter, self.minute = Meter(), 31 * 24 * 60 - 300
        self.meter.advance(self.minute * MINUTE_S)
        self.attempts = dict.fromkeys(JOBS, 1)
        self.held: dict[str, tuple[Holding, ...]] = {}
        # Exact income by owner, without what is credited back, of minutes in contact.
        self.income = dict.fromkeys(OWNERS, Fraction(0))
        self.prices = dict.fromkeys(SITES, 0)
        self.bookings = 0

    def play(self, step: Step) -> None:
        rng = random.Random(step.seed)
        job = rng.choice(JOBS)
        getattr(self, f"_{step.kind}")(rng, job)

    def _wait(self, rng: random.Random, _job: str) -> None:
        for _ in range(rng.choice((1, 7, 61, 400))):
            for one in (one for of in self.held.values() for one in of if not one.away):
                chips = one.amounts[0][1]
                self.income[one.owner] += Fraction(self.prices[one.cluster] * chips, 60)
            self.minute += 1
        self.meter.advance(self.minute * MINUTE_S)

    def _back(self, rng: random.Random, _job: str) -> None:
        self.meter.advance((self.minute - rng.randint(1, 90)) * MINUTE_S)

    def _hold(self, rng: random.Random, job: str) -> None:
        sites = rng.sample(SITES, rng.randint(1, 2))
        self.held[job] = tuple(
            holding(
                site,
                rng.randint(1, 9),
                attempt=self.attempts[job],
                phase=rng.choice(("waiting", "starting", "running", "saving", "leaving")),
                late=rng.choice(((), (), (OWNERS[0],), OWNERS)),
                away=rng.random() < 0.2,
            )
            for site in sites
        )
        self.bookings += 4
        hold(self.meter, *self.held[job], job=job)

    def _release(self, rng: random.Random, job: str) -> None:
        self.held.pop(job, None)
        hold(self.meter, job=job)
        self.attempts[job] += rng.randint(0, 1)

    def _checkpoint(self, _rng: random.Random, job: str) -> None:
        self.meter.note_checkpoint(job, self.attempts[job])

    def _lose(self, rng: random.Random, job: str) -> None:
        self.meter.lose(job, self.attempts[job], rng.choice(OWNERS))

    def _prove(self, rng: random.Random, _job: str) -> None:
        if not self.meter.absences:
            return
        (job, attempt, cluster), found = rng.choice(list(self.meter.absences.items()))
        absence = rng.choice(found)
        begin = rng.randint(absence.begin_ms - 5, absence.end_ms + 5)
        try:
            self.meter.prove(job, (attempt, cluster), begin, begin + rng.randint(0, 10**6))
        except ConflictError:
            return

    def _price(self, rng: random.Random, _job: str) -> None:
        site, price = rng.choice(SITES), rng.choice((0, 1, 7, 333_333, 2_500_000))
        given = tariff(chip_price(site, f"{price / 10**6:.6f}"))
        try:
            self.meter.prices.check(given, self.meter.now_ms)
        except FieldError:
            return
        self.meter.publish(given)
        self.prices[site] = price

    def _end(self, _rng: random.Random, job: str) -> None:
        self.held.pop(job, None)
        self.meter.end(job)


def played(steps: list[Step]) -> Played:
    """Return what has played `steps`."""
    made = Played()
    for step in steps:
        made.play(step)
    return made


def to_bytes(meter: Meter) -> bytes:
    """Return a meter as the pool state stores it."""
    return pydantic_core.to_json(column_codec(Meter).encode([meter]))


def from_bytes(body: bytes) -> Meter:
    (found,) = column_codec(Meter).decode(pydantic_core.from_json(body), 1)
    assert isinstance(found, Meter)
    return found


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_all_entries_sum_to_nothing_and_each_amount_follows_from_price_and_time(steps: list[Step]) -> None:
    """After every step; no entry is lost, doubled or without its pair."""
    made = Played()
    for step in steps:
        before = tuple(made.meter.ledger.transactions)
        made.play(step)
        assert tuple(made.meter.ledger.transactions[: len(before)]) == before
    found = check_ledger(made.meter.ledger)
    assert (found.sum, found.unpaired, found.differences) == (0, 0, ())
    assert found.entries == made.meter.ledger.num_entries


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 60))
def test_a_ledger_from_nothing_equals_the_running_one_to_the_byte(steps: list[Step], crash: int) -> None:
    """Also if its state was stored and read back on the way, as a restart does."""
    running = Played()
    for number, step in enumerate(steps):
        if number == crash:
            running.meter = from_bytes(to_bytes(running.meter))
        running.play(step)
    assert to_bytes(running.meter) == to_bytes(played(steps).meter)


@settings(max_examples=100, deadline=None)
@given(STEPS.filter(lambda steps: not any(one.kind == "back" for one in steps)))
def test_owners_are_credited_what_a_count_by_minutes_finds(steps: list[Step]) -> None:
    """Apart from times without contact: the difference is below a millionth for each interval that began."""
    made = played([*steps, Step("wait", 0)])
    booked = dict.fromkeys(OWNERS, 0)
    for one in (*made.meter.ledger.transactions, *open_transactions(made.meter, made.meter.now_ms)):
        for account, millionths in one.entries if one.kind == "usage" else ():
            owner = account.removeprefix("owner:")
            if owner in booked:
                booked[owner] += millionths
    for owner, exact in made.income.items():
        assert abs(booked[owner] - exact) <= made.bookings + len(JOBS)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_statements_of_owners_and_users_are_two_sides_of_one_ledger(steps: list[Step]) -> None:
    """The income of all owners is the cost of all users, in each month; no statement changes what is booked."""
    made = played(steps)
    meter = made.meter
    before = to_bytes(meter)
    found = (*meter.ledger.transactions, *open_transactions(meter, meter.now_ms))

    def total(party: PartyKind, name: str, month: str) -> int:
        made = make_statement(found, "EUR", party, name, month, meter.now_ms)
        exact = made.total_cents * 10_000 + made.carried_out_millionths
        assert exact == made.carried_in_millionths + sum(line.millionths for line in made.lines)
        assert made.total_cents == sum(line.cents for line in made.lines)
        return sum(line.millionths for line in made.lines)

    for month in ("1970-01", "1970-02", "1970-03"):
        income = sum(total("owner", owner, month) for owner in OWNERS)
        assert income == total("user", "ann", month) == sum(total("job", job, month) for job in JOBS)
    assert to_bytes(meter) == before


@pytest.mark.parametrize("seed", range(20))
def test_a_stored_meter_is_read_back_as_it_was(seed: int) -> None:
    """All of it: open holdings, absences, prices, transactions."""
    rng = random.Random(seed)
    meter = played([Step(rng.choice(KINDS), rng.getrandbits(32)) for _ in range(200)]).meter
    assert from_bytes(to_bytes(meter)) == meter == copy.deepcopy(meter)
