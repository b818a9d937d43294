"""The rules of the meter and the ledger: what is charged to which job, and credited to which owner."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from isthmus.control.accounting.check_ledger import check_ledger
from isthmus.control.accounting.ledger import Transaction
from isthmus.control.accounting.make_statement import make_statement, open_transactions
from isthmus.control.accounting.meter import Meter
from isthmus.core.errors import ConflictError, FieldError, InputError
from isthmus.core.owner.check_tariff import check_tariff
from isthmus.core.pool_resource import PoolResource
from isthmus.core.views.ledger_views import PartyKind, StatementView
from tests.control.priced import HOUR_S, balances, chip_price, hold, holding, meter, tariff

JAN_31_23_S = 31 * 24 * HOUR_S - HOUR_S
"""An hour before the end of January 1970."""


def statement(made: Meter, party: PartyKind, name: str, month: str = "1970-01") -> StatementView:
    """Return a statement with what is held now."""
    found = (*made.ledger.transactions, *open_transactions(made, made.now_ms))
    return make_statement(found, "EUR", party, name, month, made.now_ms)


def test_held_chips_are_charged_to_the_job_and_credited_to_their_owner() -> None:
    """Two chips for three hours at 1.50 cost 9.00; what the job owes the owner is owed."""
    made = meter(chip_price("a", "1.50"))
    hold(made, holding("a", chips=2))
    made.advance(3 * HOUR_S)
    hold(made)
    made.advance(9 * HOUR_S)
    assert balances(made) == {"job:j": -9.0, "owner:owner-a": 9.0}
    check = check_ledger(made.ledger)
    assert (check.entries, check.sum, check.unpaired, check.differences) == (2, 0, 0, ())


def test_each_phase_is_an_interval_of_its_own() -> None:
    """Waiting, starting, running, saving and leaving are told apart, without a gap between them."""
    made = meter()
    for phase in ("waiting", "starting", "running", "saving", "leaving"):
        hold(made, holding(phase=phase))
        made.advance(made.now_ms / 1000 + HOUR_S)
    hold(made)
    seen = [(one.phase, one.begin_ms, one.end_ms) for one in made.ledger.transactions]
    hour_ms = int(HOUR_S * 1000)
    phases = ("waiting", "starting", "running", "saving", "leaving")
    assert seen == [(phase, i * hour_ms, (i + 1) * hour_ms) for i, phase in enumerate(phases)]


def test_chips_that_wait_for_a_late_site_are_charged_and_credited_back_by_its_owner() -> None:
    """The waiting owner is paid, the job pays nothing in the end, the late owner pays."""
    made = meter()
    hold(made, holding("a", phase="waiting", late=("owner-b",)))
    made.advance(HOUR_S)
    hold(made, holding("a"), holding("b"))
    assert balances(made) == {"owner:owner-a": 1.0, "owner:owner-b": -1.0}
    assert [one.kind for one in made.ledger.transactions] == ["usage", "late"]


def test_late_owners_share_what_they_cost_to_the_millionth() -> None:
    """A third each of 1.00: the first pays the millionth that is left."""
    made = meter()
    hold(made, holding("a", phase="waiting", late=("x", "y", "z")))
    made.advance(HOUR_S)
    hold(made)
    paid = [made.ledger.balances[f"owner:{name}"] for name in "xyz"]
    assert paid == [-333_334, -333_333, -333_333]


def test_an_attempt_lost_by_an_owner_is_not_charged_and_the_other_owners_are_paid() -> None:
    """Owner b loses the attempt after two hours: it pays a, and itself nothing."""
    made = meter()
    hold(made, holding("a"), holding("b"))
    made.advance(2 * HOUR_S)
    made.lose("j", 1, "owner-b")
    hold(made, holding("a", phase="leaving"))
    made.advance(3 * HOUR_S)
    hold(made)
    assert balances(made) == {"owner:owner-a": 3.0, "owner:owner-b": -3.0}


def test_work_that_was_saved_before_the_loss_is_charged() -> None:
    """Of three hours the first two are in a checkpoint: the job keeps this work and pays for it."""
    made = meter()
    hold(made, holding("a"))
    made.advance(2 * HOUR_S)
    made.note_checkpoint("j", 1)
    made.advance(3 * HOUR_S)
    made.lose("j", 1, "owner-a")
    hold(made)
    assert balances(made) == {"job:j": -2.0, "owner:owner-a": 2.0}


def test_work_redone_after_a_fault_of_the_job_is_charged() -> None:
    """Both attempts are, since no owner is at fault."""
    made = meter()
    for attempt in (1, 2):
        hold(made, holding("a", attempt=attempt))
        made.advance(attempt * HOUR_S)
        hold(made)
    assert balances(made) == {"job:j": -2.0, "owner:owner-a": 2.0}


def test_a_loss_concerns_its_own_attempt_alone_and_counts_once() -> None:
    """The next attempt is charged; a loss that is reported twice is credited once."""
    made = meter()
    hold(made, holding("a"))
    made.advance(HOUR_S)
    made.lose("j", 1, "owner-a")
    made.lose("j", 1, "owner-a")
    hold(made, holding("a", attempt=2))
    made.advance(3 * HOUR_S)
    hold(made)
    assert balances(made) == {"job:j": -2.0, "owner:owner-a": 2.0}


def test_a_loss_is_credited_although_all_parts_are_released_by_then() -> None:
    """The amounts of an attempt are known until a later one holds something."""
    made = meter()
    hold(made, holding("a"))
    made.advance(HOUR_S)
    hold(made)
    made.lose("j", 1, "owner-a")
    assert balances(made) == {}


def test_a_price_change_cuts_the_interval() -> None:
    """An hour at 1, two at 3: the second price begins in the middle of the run."""
    made = meter(chip_price("a", 1))
    made.publish(tariff(chip_price("a", 3, **{"from": "1970-01-01T01:00"})))
    hold(made, holding("a"))
    made.advance(3 * HOUR_S)
    hold(made)
    assert [(one.price_millionths, one.end_ms) for one in made.ledger.transactions] == [
        (1_000_000, 3_600_000),
        (3_000_000, 10_800_000),
    ]
    assert balances(made)["owner:owner-a"] == 7.0


def test_a_price_that_is_published_in_mid_run_holds_from_then_on() -> None:
    """What was held before at no price costs nothing."""
    made = Meter()
    hold(made, holding("a"))
    made.advance(HOUR_S)
    made.publish(tariff(chip_price("a", 2)))
    made.advance(2 * HOUR_S)
    hold(made)
    assert balances(made) == {"job:j": -2.0, "owner:owner-a": 2.0}
    assert len(made.ledger.transactions) == 1


def test_prices_follow_the_hours_of_the_day_over_midnight_and_the_class_of_the_job() -> None:
    """A night from 20:00 to 08:00 at 1, the day at 5; jobs of class high pay 9 all day."""
    made = meter(
        *(chip_price("a", 1, hours="20:00-08:00", **{"class": name}) for name in ("low", "middle")),
        *(chip_price("a", 5, hours="08:00-20:00", **{"class": name}) for name in ("low", "middle")),
        chip_price("a", 9, **{"class": "high"}),
    )
    made.advance(7 * HOUR_S)
    hold(made, holding("a"))
    hold(made, holding("a"), job="h", job_class="high")
    made.advance((24 + 9) * HOUR_S)
    hold(made)
    hold(made, job="h")
    assert balances(made) == {"job:j": -(1 + 60 + 12 + 5), "job:h": -26 * 9, "owner:owner-a": 78 + 234}


def test_storage_and_reserved_bandwidth_have_prices_of_their_own() -> None:
    """Two terabytes for an hour go to the owner of the cluster, half a Gbit/s to the pool."""
    made = meter({"cluster": "a", "per_tb_hour": "0.01"}, {"link": "a>b", "per_gbps_hour": "0.5"})
    hold(
        made,
        holding("a", amounts=((PoolResource.storage("a"), 2 * 10**12),)),
        holding("", owner="", amounts=((PoolResource.link("a", "b"), 500_000),)),
    )
    made.advance(HOUR_S)
    hold(made)
    assert balances(made) == {"job:j": -0.27, "owner:owner-a": 0.02, "pool": 0.25}


def test_a_site_that_is_away_charges_nothing_until_it_is_back_with_the_part() -> None:
    """A part that is still there was there all the time: the hours of the absence are charged, dated at the return."""
    made = meter()
    hold(made, holding("a"))
    made.advance(HOUR_S)
    hold(made, holding("a", away=True))
    made.advance(3 * HOUR_S)
    assert balances(made) == {"job:j": -1.0, "owner:owner-a": 1.0}
    hold(made, holding("a"))
    assert balances(made) == {"job:j": -3.0, "owner:owner-a": 3.0}
    assert [(one.kind, one.dated_ms) for one in made.ledger.transactions][-1] == ("proven", 3 * 3_600_000)


def test_an_agent_proves_what_its_site_held_while_it_was_away_each_moment_once() -> None:
    """Proofs that overlap, or that lie outside the absence, are refused and charge nothing."""
    made = meter()
    hold(made, holding("a", away=True))
    made.advance(10 * HOUR_S)
    hold(made)
    assert balances(made) == {}
    hour_ms = 3_600_000
    made.prove("j", (1, "a"), 0, 4 * hour_ms)
    for begin, end in ((3, 5), (0, 4), (1, 2), (-1, 0), (9, 11), (5, 5), (6, 5)):
        with pytest.raises(ConflictError):
            made.prove("j", (1, "a"), begin * hour_ms, end * hour_ms)
    with pytest.raises(ConflictError):
        made.prove("j", (2, "a"), 0, hour_ms)
    made.prove("j", (1, "a"), 4 * hour_ms, 5 * hour_ms)
    assert balances(made) == {"job:j": -5.0, "owner:owner-a": 5.0}


def test_a_proof_of_an_attempt_that_its_owner_lost_is_credited_back() -> None:
    """The part was released by the end of its lease: what it held until then is the owner's own loss."""
    made = meter()
    hold(made, holding("a", away=True))
    made.advance(2 * HOUR_S)
    made.lose("j", 1, "owner-a")
    hold(made)
    made.end("j")
    made.prove("j", (1, "a"), 0, 3_600_000)
    assert balances(made) == {}
    assert [one.kind for one in made.ledger.transactions] == ["proven", "lost"]


def test_a_job_that_is_forgotten_keeps_its_cost() -> None:
    """Its transactions stay with its user and its statement."""
    made = meter()
    hold(made, holding("a"))
    made.advance(HOUR_S)
    made.end("j")
    assert made.jobs == {}
    assert statement(made, "job", "j").total_cents == statement(made, "user", "ann").total_cents == 100


def test_a_clock_that_is_set_back_books_nothing_twice() -> None:
    """Time stands still until it is where it was."""
    made = meter()
    hold(made, holding("a"))
    made.advance(2 * HOUR_S)
    made.advance(HOUR_S)
    hold(made, holding("a", chips=2))
    made.advance(2 * HOUR_S)
    hold(made)
    assert balances(made)["owner:owner-a"] == 2.0


def test_a_month_is_closed_at_its_end_and_runs_go_on() -> None:
    """Of three hours around the end of January one belongs to it."""
    made = meter(now_s=JAN_31_23_S)
    hold(made, holding("a"))
    made.advance(JAN_31_23_S + 3 * HOUR_S)
    hold(made)
    january, february = statement(made, "job", "j"), statement(made, "job", "j", "1970-02")
    assert (january.total_cents, february.total_cents) == (100, 200)
    assert (january.final, february.final) == (True, False)


def test_a_statement_counts_what_is_held_now_and_books_nothing() -> None:
    """The month is not over: what is held up to now is part of the sum."""
    made = meter()
    hold(made, holding("a"))
    made.advance(HOUR_S)
    assert statement(made, "user", "ann").total_cents == 100
    assert made.ledger.transactions == []


def test_what_is_held_now_is_cut_at_the_end_of_the_month() -> None:
    """No event has come since January: of four hours up to now one belongs to it."""
    made = meter(now_s=JAN_31_23_S)
    hold(made, holding("a"))
    now_ms = int((JAN_31_23_S + 4 * HOUR_S) * 1000)
    found = open_transactions(made, now_ms)
    totals = [make_statement(found, "EUR", "job", "j", month, now_ms).total_cents for month in ("1970-01", "1970-02")]
    assert totals == [100, 300]


def test_lines_are_rounded_once_and_their_remainders_carried() -> None:
    """A third of a cent per job: three lines give one cent, and a month leaves its rest to the next."""
    made = meter(chip_price("a", "0.003333"))
    for job in ("j1", "j2", "j3", "j4"):
        hold(made, holding("a"), job=job)
    made.advance(HOUR_S)
    for job in ("j1", "j2", "j3", "j4"):
        hold(made, job=job)
    january = statement(made, "user", "ann")
    assert [line.cents for line in january.lines] == [0, 0, 0, 1]
    assert (january.total_cents, january.carried_out_millionths) == (1, 4 * 3_333 - 10_000)
    february = statement(made, "user", "ann", "1970-02")
    assert february.carried_in_millionths == january.carried_out_millionths


def test_remainders_below_a_millionth_are_carried_from_interval_to_interval() -> None:
    """A thousand cuts of a price that no cut divides give what one interval gives."""
    cut, whole = meter(chip_price("a", "0.000007")), meter(chip_price("a", "0.000007"))
    hold(cut, holding("a"))
    hold(whole, holding("a"))
    for step in range(1, 1001):
        for made in (cut, whole):
            made.advance(step * 36.0)
        hold(cut, holding("a", phase="saving" if step % 2 else "running"))
    hold(cut)
    hold(whole)
    assert cut.ledger.balances == whole.ledger.balances == {"job:j": -70, "owner:owner-a": 70}


def test_each_damage_of_a_ledger_is_found() -> None:
    """A changed amount, a lost entry, a lost transaction and a changed balance each leave a difference."""

    def damaged() -> Meter:
        made = meter()
        for hour in range(1, 4):
            hold(made, holding("a", phase="running" if hour % 2 else "saving"))
            made.advance(hour * HOUR_S)
        hold(made)
        return made

    assert check_ledger(damaged().ledger).differences == ()
    made = damaged()
    first = made.ledger.transactions[0]
    made.ledger.transactions[0] = _with_entries(first, (("job:j", -2), ("owner:owner-a", 2)))
    assert any("by price and time" in text for text in check_ledger(made.ledger).differences)
    made = damaged()
    made.ledger.transactions[0] = _with_entries(first, first.entries[:1])
    found = check_ledger(made.ledger)
    assert (found.sum, found.unpaired) == (-1_000_000, 1)
    made = damaged()
    del made.ledger.transactions[1]
    assert any("stands where" in text for text in check_ledger(made.ledger).differences)
    made = damaged()
    made.ledger.balances["job:j"] += 1
    assert [text.split(":")[0] for text in check_ledger(made.ledger).differences] == ["job"]


def _with_entries(one: Transaction, entries: tuple[tuple[str, int], ...]) -> Transaction:
    fields = {name: getattr(one, name) for name in Transaction.__slots__}
    return Transaction(**(fields | {"entries": entries}))


@pytest.mark.parametrize(
    ("prices", "text"),
    [
        ([chip_price("a", 1), chip_price("a", 2)], "overlaps price 1"),
        ([chip_price("a", 1), chip_price("a", 2, **{"class": "low"})], "class low, at 00:00"),
        ([chip_price("a", 1, hours="00:00-12:00"), chip_price("a", 2, hours="11:59-00:00")], "at 11:59"),
        ([chip_price("a", 1, hours="08:00-20:00")], "from 00:00 to 08:00"),
        ([chip_price("a", 1, hours="00:00-20:00")], "from 20:00 to 24:00"),
        ([chip_price("a", 1, **{"class": "low"})], "no price for class middle"),
        ([chip_price("a", 1, **{"from": "1970-01-01T00:00:09"})], "has passed"),
    ],
)
def test_prices_that_overlap_leave_gaps_or_hold_backwards_are_refused(
    prices: list[dict[str, object]], text: str
) -> None:
    """Each error names the price; a tariff covers each minute of a day once for each class."""
    with pytest.raises(FieldError, match=text) as found:
        check_tariff(tariff(*prices), now_s=10.0)
    assert found.value.place[0] == "prices"


@pytest.mark.parametrize(
    "price",
    [
        chip_price("a", -1),
        chip_price("a", "0.0000001"),
        chip_price("a", "nan"),
        chip_price("a", "1e12"),
        chip_price("a", True),
        chip_price("a", 1, per_tb_hour=1),
        chip_price("a", 1, hours="8-20"),
        chip_price("a", 1, **{"from": "tomorrow"}),
        chip_price("a", 1, **{"class": "gold"}),
        {"cluster": "a", "per_chip_hour": 1},
        {"link": "a", "per_gbps_hour": 1},
        {"cluster": "a", "node_group": "g", "per_tb_hour": 1},
        {"per_tb_hour": 1},
    ],
)
def test_a_price_that_is_none_is_refused(price: dict[str, object]) -> None:
    """Negative, too fine, unreadable, of two things or of nothing."""
    with pytest.raises((ValidationError, InputError)):
        tariff(price)


def test_a_price_of_a_file_is_the_decimal_that_it_shows() -> None:
    """0.1 is a tenth, not the binary fraction next to it."""
    assert tariff(chip_price("a", 0.1)).prices[0].price_millionths == 100_000


def test_a_pool_has_one_currency_and_a_time_one_price() -> None:
    """Both are refused before anything is published; published prices do not change."""
    made = meter()
    with pytest.raises(ConflictError, match="in USD, the pool in EUR"):
        made.prices.check(tariff(chip_price("a", 1), currency="USD"), made.now_ms)
    with pytest.raises(FieldError, match="overlaps a published price"):
        made.prices.check(tariff(chip_price("a", 2)), made.now_ms)
    assert made.prices.check(tariff(chip_price("a", 2)), made.now_ms + 1)
    assert not made.prices.check(tariff(chip_price("a", 1)), made.now_ms), "a repeated request"


@pytest.mark.parametrize(
    "month", ["1970", "1970-13", "1970-00", "70-01", "", "1970-01-01", "x" * 99, "9999-12", "2\u066027-01"]
)
def test_a_month_that_is_none_is_refused(month: str) -> None:
    """The error shows a part of it."""
    with pytest.raises(InputError, match="is no month"):
        statement(meter(), "job", "j", month)
