"""`Meter`: folds what jobs hold, event by event, into priced intervals of the ledger.

The rules:

- an interval ends where what is held, its phase, its price or the month changes; times are the server's;
- chips that a site's scheduler grants count since it has granted them, if the report of it comes later;
- chips that wait because another site is late are charged, and the late owner credits the job back;
- an attempt that is lost by an owner's fault is credited back by this owner, as far as its work is lost: from its last
  checkpoint on, or from its start; work redone after a fault of the job itself is charged;
- chips that a preempted job lends count for it until its site has released them, then for the job that takes them;
- a site without contact charges nothing until its agent is back: what it still holds it held all the time, and what it
  has released meanwhile its agent proves, each moment once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import is_

from isthmus.control.accounting.book_usage import accrued, book_usage, credit_back
from isthmus.control.accounting.holdings import Absence, Holding, HoldingKey, JobMeter, OpenHolding
from isthmus.control.accounting.ledger import Ledger
from isthmus.control.accounting.price_book import PriceBook
from isthmus.core.errors import ConflictError
from isthmus.core.months import month_begin_ms, next_month_ms
from isthmus.core.owner.tariff import Tariff
from isthmus.core.priority import Priority

ABSENCE_KEPT_MS = 92 * 24 * 3_600_000
"""How long an agent may prove what its site held while it was away: a quarter of a year."""


@dataclass(slots=True, kw_only=True)
class Meter:
    """The meter's state. Times are milliseconds since the epoch on the server's clock, and never go back."""

    now_ms: int = 0
    jobs: dict[str, JobMeter] = field(default_factory=dict)
    # The clusters whose agent is lost.
    away_sites: set[str] = field(default_factory=set)
    # By job, attempt and cluster.
    absences: dict[tuple[str, int, str], list[Absence]] = field(default_factory=dict)
    prices: PriceBook = field(default_factory=PriceBook)
    ledger: Ledger = field(default_factory=Ledger)
    # The end of the month of `now_ms`; 0 before the first event and after a snapshot was read.
    month_end_ms: int = field(default=0, compare=False, repr=False)

    def advance(self, now_s: float) -> None:
        """Advance to the time of an event, never backwards. Each month is closed at its end."""
        now_ms = int(now_s * 1000)
        if now_ms >= self.month_end_ms:
            self._close_months(now_ms)
        if now_ms > self.now_ms:
            self.now_ms = now_ms

    def publish(self, tariff: Tariff, owner: str = "") -> None:
        """Put a checked tariff of `owner` into effect (`PriceBook.check`)."""
        self.prices.add(tariff, self.now_ms, owner)

    def observe(
        self,
        job_id: str,
        user: str,
        job_class: Priority,
        holdings: Collection[Holding],
        project: str = "",
        granted_ms: Mapping[HoldingKey, int] | None = None,
    ) -> None:
        """Record what a job holds from now on; intervals that end are booked.

        What held no chips before and has some now has them since `granted_ms`, within this month.
        """
        job = self.jobs.get(job_id)
        if job is None:
            if not holdings:
                return
            job = self.jobs[job_id] = JobMeter(user=user, job_class=job_class, project=project)
        elif len(holdings) == len(job.held) and all(map(is_, holdings, (one.holding for one in job.held.values()))):
            return
        found = {(one.attempt, one.cluster): one for one in holdings}
        for key, opened in tuple(job.held.items()):
            now = found.pop(key, None)
            if now is opened.holding or now == opened.holding:
                continue
            at_ms = self.now_ms
            if now is not None and granted_ms and key in granted_ms and not opened.holding.has_chips:
                at_ms = self._within_month(granted_ms[key], opened.since_ms)
            self._close(job_id, job, opened, now, at_ms)
            del job.held[key]
            if now is not None:
                job.held[key] = OpenHolding(holding=now, since_ms=at_ms)
        for key, one in found.items():
            at_ms = self._within_month(granted_ms[key]) if granted_ms and key in granted_ms else self.now_ms
            job.held[key] = OpenHolding(holding=one, since_ms=at_ms)
        if found:
            _forget_attempts(job)

    def end(self, job_id: str) -> None:
        """Forget an ended job, which holds nothing any more; its transactions stay."""
        self.observe(job_id, "", "middle", ())
        self.jobs.pop(job_id, None)

    def note_checkpoint(self, job_id: str, attempt: int) -> None:
        """Record that the work of an attempt up to now is saved."""
        job = self.jobs.get(job_id)
        if job is not None:
            job.saved[attempt] = job.charged.get(attempt, 0) + accrued(self.prices, job, attempt, self.now_ms)

    def lose(self, job_id: str, attempt: int, owner: str) -> None:
        """Make `owner` pay back what an attempt has cost since its last checkpoint, and what it costs from now on."""
        job = self.jobs.get(job_id)
        if job is None or attempt in job.lost_by:
            return
        for (of, _), opened in job.held.items():
            if of == attempt:
                self._book_open(job_id, job, opened, self.now_ms)
        unsaved = max(0, job.charged.get(attempt, 0) - job.saved.get(attempt, 0))
        job.lost_by[attempt] = owner
        credit_back(self.ledger, job_id, job, (attempt, ""), "lost", (owner,), unsaved, self.now_ms)

    def is_away(self, job_id: str, key: HoldingKey) -> bool:
        """Return whether what a part holds is not charged because its site is away."""
        job = self.jobs.get(job_id)
        return job is not None and key in job.held and job.held[key].holding.away

    def prove(self, job_id: str, key: HoldingKey, begin_ms: int, end_ms: int) -> None:
        """Charge what a part held in [begin_ms, end_ms) while its site was away.

        Raises `ConflictError` for a time in which the site was not away, or that was proved before.
        """
        found = self.absences.get((job_id, *key), [])
        absence = next((one for one in found if one.begin_ms <= begin_ms < end_ms <= one.end_ms), None)
        what = f"job {job_id}, attempt {key[0]} at {key[1]}, {begin_ms} to {end_ms} ms"
        if absence is None:
            raise ConflictError(f"{what}: the site was not away all this time", hint="prove times of one absence")
        if any(begin_ms < until and begun < end_ms for begun, until in absence.proved):
            raise ConflictError(f"{what}: overlaps a time that was proved before", hint="prove each moment once")
        absence.proved.append((begin_ms, end_ms))
        self._book_absence(job_id, absence, begin_ms, end_ms)

    def prove_until(self, job_id: str, key: HoldingKey, until_ms: int) -> None:
        """Charge what a part held up to `until_ms` during the unproved part of its site's absences."""
        for absence in self.absences.get((job_id, *key), ()):
            end_ms = min(absence.end_ms, until_ms)
            if not absence.proved and absence.begin_ms < end_ms:
                self.prove(job_id, key, absence.begin_ms, end_ms)

    def _within_month(self, at_ms: int, earliest_ms: int = 0) -> int:
        """Return a past time of this month, not before `earliest_ms`: statements of former months are closed."""
        return min(max(at_ms, earliest_ms, month_begin_ms(self.now_ms)), self.now_ms)

    def _close(self, job_id: str, job: JobMeter, opened: OpenHolding, now: Holding | None, at_ms: int) -> None:
        """Book an interval that ends at `at_ms`; `now` is what the part holds from then on."""
        one = opened.holding
        if not one.away:
            self._book_open(job_id, job, opened, at_ms)
            return
        absences = self.absences.setdefault((job_id, *one.key), [])
        lost_by = job.lost_by.get(one.attempt, "")
        absences.append(
            Absence(
                holding=one, user=job.user, job_class=job.job_class, lost_by=lost_by,
                begin_ms=opened.since_ms, end_ms=at_ms, project=job.project,
            )
        )  # fmt: skip
        if now is not None and not now.away:
            self.prove_until(job_id, one.key, self.now_ms)

    def _book_open(self, job_id: str, job: JobMeter, opened: OpenHolding, until_ms: int) -> None:
        """Book an open holding up to `until_ms`, unless its site is away."""
        if not opened.holding.away:
            book_usage(self.ledger, self.prices, job_id, job, opened.holding, (opened.since_ms, until_ms))
            opened.since_ms = until_ms

    def _book_absence(self, job_id: str, absence: Absence, begin_ms: int, end_ms: int) -> None:
        job = self.jobs.get(job_id) or JobMeter(user=absence.user, job_class=absence.job_class, project=absence.project)
        attempt = absence.holding.attempt
        if absence.lost_by and attempt not in job.lost_by:
            job = JobMeter(
                user=job.user, job_class=job.job_class, project=job.project, lost_by={attempt: absence.lost_by}
            )
        book_usage(self.ledger, self.prices, job_id, job, absence.holding, (begin_ms, end_ms), self.now_ms)

    def _close_months(self, now_ms: int) -> None:
        """Close the months that end up to `now_ms`, and look up the end of the present one."""
        while (self.jobs or self.absences) and (end_ms := next_month_ms(self.now_ms)) <= now_ms:
            self._close_month(end_ms)
        self.month_end_ms = next_month_ms(max(self.now_ms, now_ms))

    def _close_month(self, end_ms: int) -> None:
        """Book all that is held up to the end of a month, so that its statements are complete."""
        self.now_ms = end_ms
        for job_id, job in self.jobs.items():
            for opened in job.held.values():
                self._book_open(job_id, job, opened, end_ms)
        for key, absences in tuple(self.absences.items()):
            self.absences[key] = [one for one in absences if one.end_ms > end_ms - ABSENCE_KEPT_MS]
            if not self.absences[key]:
                del self.absences[key]


def _forget_attempts(job: JobMeter) -> None:
    """Forget the amounts of attempts that hold nothing, once a later one holds something: they have ended."""
    attempts = {attempt for attempt, _ in job.held}
    if attempts.issuperset(job.charged.keys() | job.saved.keys() | job.lost_by.keys()):
        return
    for amounts in (job.charged, job.saved, job.lost_by):
        for attempt in [one for one in amounts if one not in attempts and one < max(attempts)]:
            del amounts[attempt]
