"""The view of quotas: each account with its limits, what it holds and what it has used of the month."""

from __future__ import annotations

from typing import Literal

from isthmus.core.base_model import FrozenModel, NonNegativeFloat, NonNegativeInt
from isthmus.core.priority import Priority

AccountKind = Literal["user", "group", "project"]


class QuotaPlace(FrozenModel):
    """What an account holds of a cluster or one of its node groups, is guaranteed there, and may hold."""

    cluster: str
    node_group: str | None = None
    guaranteed_chips: NonNegativeInt = 0
    max_chips: NonNegativeInt | None = None
    num_chips: NonNegativeInt = 0


class QuotaRow(FrozenModel):
    """An account. Limits are None where there is none; money is in millionths of the currency's unit.

    `percent` is the level of the month that was passed, 0, 80 or 100; `num_capped` jobs wait for one of its limits.
    A project lends what it does not hold of its guarantee, and has borrowed what it holds above it: the guarantee is
    `guaranteed_chips` of any cluster, and those of `places`. The `owner` of clusters sets its quota of their chips.
    `jobs` are those that hold chips, as far as the caller may see them.
    """

    kind: AccountKind
    name: str
    parent: str | None = None
    owner: str | None = None
    priority: Priority | None = None
    weight: float | None = None
    guaranteed_chips: NonNegativeInt = 0
    max_chips: NonNegativeInt | None = None
    num_chips: NonNegativeInt = 0
    num_jobs: NonNegativeInt = 0
    max_chip_hours: NonNegativeInt | None = None
    chip_hours: NonNegativeFloat = 0.0
    max_spend_millionths: NonNegativeInt | None = None
    spend_millionths: int = 0
    percent: NonNegativeInt = 0
    num_capped: NonNegativeInt = 0
    places: tuple[QuotaPlace, ...] = ()
    jobs: tuple[str, ...] = ()

    @property
    def account(self) -> str:
        """The name of the account among all kinds."""
        return f"{self.kind}:{self.name}"


class QuotaView(FrozenModel):
    """The accounts that the caller may see, in the month `YYYY-MM` of `now_s`; `more`: others are left out."""

    now_s: float
    month: str
    currency: str = ""
    require_project: bool = False
    rows: tuple[QuotaRow, ...] = ()
    more: bool = False


class AccountsView(FrozenModel):
    """The accounts that were set, in numbers."""

    projects: NonNegativeInt
    groups: NonNegativeInt
    users: NonNegativeInt
    accepted_s: float
