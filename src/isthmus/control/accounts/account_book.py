"""`AccountBook`: what each account holds now, and what it has used and spent in the present month.

Times are milliseconds since the epoch on the server's clock, as the meter counts them: they never go back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from isthmus.control.accounts.account_tree import AccountTree
from isthmus.core.months import month_begin_ms, next_month_ms
from isthmus.core.owner.accounts import Accounts
from isthmus.core.owner.chip_scope import ChipScope
from isthmus.core.pool_resource import PoolResource

MS_PER_HOUR = 3_600_000
WARN_PERCENT, FULL_PERCENT = 80, 100


@dataclass(slots=True, kw_only=True)
class AccountUse:
    """What the jobs of an account hold and have used. Amounts of the month are those up to `at_ms`."""

    num_chips: int = 0
    # The same chips by node group, counted if the accounts name places.
    chips_at: dict[PoolResource, int] = field(default_factory=dict)
    # Jobs that hold chips.
    num_jobs: int = 0
    # Chip-milliseconds, and money in millionths of the currency's unit, in the month [month_begin_ms, month_end_ms).
    chip_ms: int = 0
    millionths: int = 0
    at_ms: int = 0
    month_begin_ms: int = 0
    month_end_ms: int = 0
    # The level that the amounts of the month up to `percent_end_ms` have passed: 0, 80 or 100 percent of a limit.
    percent: int = 0
    percent_end_ms: int = 0

    def chips_in(self, scope: ChipScope) -> int:
        """Return the chips of a scope that are held."""
        return scope.chips_in(self.chips_at) if scope.cluster else self.num_chips

    def settle(self, now_ms: int) -> None:
        """Count the chips that are held up to `now_ms`; in a new month begin from its first moment."""
        if now_ms >= self.month_end_ms:
            self.month_begin_ms, self.month_end_ms = month_begin_ms(now_ms), next_month_ms(now_ms)
            self.chip_ms = self.millionths = 0
            self.at_ms = max(self.at_ms, self.month_begin_ms)
        self.chip_ms += self.num_chips * max(0, now_ms - self.at_ms)
        self.at_ms = max(self.at_ms, now_ms)


@dataclass(slots=True, kw_only=True)
class AccountBook:
    """The accounts of a pool, and what each has used. Without accounts only users are counted."""

    accounts: Accounts = field(default_factory=Accounts)
    use: dict[str, AccountUse] = field(default_factory=dict)
    # Chips that jobs claim within their guarantees, by the account whose limit they wait for, and by job.
    claims: dict[str, dict[str, int]] = field(default_factory=dict)
    # Transactions of the ledger whose amounts are counted.
    num_counted: int = 0
    cached_tree: AccountTree | None = field(default=None, compare=False, repr=False)
    # When all budgets were last looked at.
    scanned_ms: int = field(default=-1, compare=False, repr=False)
    # Messages of the present event about budgets: account, percent, text.
    notices: list[tuple[str, int, str]] = field(default_factory=list, compare=False, repr=False)

    @property
    def tree(self) -> AccountTree:
        """Lookups in the accounts."""
        if self.cached_tree is None or self.cached_tree.accounts is not self.accounts:
            self.cached_tree = AccountTree(self.accounts)
        return self.cached_tree

    def use_of(self, account: str) -> AccountUse:
        """Return what an account holds and has used; nothing for one without jobs."""
        return self.use.get(account) or AccountUse()

    def hold(self, accounts: Iterable[str], num_chips: int, num_jobs: int, now_ms: int) -> None:
        """Count `num_chips` more chips (fewer, if negative) and `num_jobs` more jobs from now on."""
        for account in accounts:
            one = self._settled(account, now_ms)
            one.num_chips += num_chips
            one.num_jobs += num_jobs

    def hold_at(self, accounts: Iterable[str], chips: Mapping[PoolResource, int], sign: int) -> None:
        """Count by node group `chips` that accounts hold from now on (`sign` 1), or have released (-1)."""
        for one in map(self.use_of, accounts):
            for key, number in chips.items():
                one.chips_at[key] = one.chips_at.get(key, 0) + sign * number
                if not one.chips_at[key]:
                    del one.chips_at[key]

    def spend(self, accounts: Iterable[str], millionths: int, dated_ms: int, now_ms: int) -> None:
        """Count what a job was charged, or with a negative amount credited back, if it counts to this month."""
        for account in accounts:
            one = self._settled(account, now_ms)
            if dated_ms >= one.month_begin_ms:
                one.millionths += millionths

    def set_level(self, account: str, percent: int, now_ms: int) -> None:
        """Set the level of the present month."""
        one = self._settled(account, now_ms)
        one.percent, one.percent_end_ms = percent, one.month_end_ms if percent else 0

    def settle_all(self, now_ms: int) -> None:
        """Count everything up to `now_ms`."""
        for one in self.use.values():
            one.settle(now_ms)

    def clear_holdings(self, now_ms: int) -> None:
        """Count that nothing is held, before what jobs hold is counted again under other accounts."""
        self.settle_all(now_ms)
        for one in self.use.values():
            one.num_chips = one.num_jobs = 0
            one.chips_at = {}

    def _settled(self, account: str, now_ms: int) -> AccountUse:
        one = self.use.get(account)
        if one is None:
            one = self.use[account] = AccountUse(at_ms=now_ms)
        one.settle(now_ms)
        return one
