"""How long the jobs of an owner's own users wait: as the server has them, and beside what they would have alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveInt
from isthmus.core.priority import Priority
from isthmus.core.views.ledger_views import StatementView


class WaitedJob(FrozenModel):
    """A job, with its waiting time in the pool so far.

    `ran_s` is the training that counts: of an attempt that was stopped, what it did up to its last checkpoint.
    `waited_s` is all other time from `submitted_s` (since the epoch) to the end of the job, or to now while it is
    `open`. `chips` are those of its plan, 0 without one; `kinds` are the chip models that it admits (none: any).
    """

    job: Name
    user: Name
    submitted_s: float
    waited_s: NonNegativeFloat
    ran_s: NonNegativeFloat
    started: bool
    open: bool
    chips: NonNegativeInt
    kinds: tuple[Name, ...] = ()
    priority: Priority = "middle"


class WaitedJobsPage(FrozenModel):
    """Jobs of an owner's `num_users` users, in order of submission; the next page begins after job number `after`.

    `after` is None on the last page. `month_over` says whether the month has ended.
    """

    owner: Name
    num_users: NonNegativeInt
    month_over: bool
    jobs: tuple[WaitedJob, ...]
    after: PositiveInt | None = None


class WaitFigures(FrozenModel):
    """Waiting times of jobs."""

    mean_s: NonNegativeFloat
    median_s: NonNegativeFloat
    p95_s: NonNegativeFloat


WaitVerdict = Literal["better", "equal", "worse", "no comparison"]
"""Whether an owner's users wait less or longer in the pool than they would alone."""


class OwnerWaits(FrozenModel):
    """Waiting times of an owner's own users for the jobs that they submitted in a month.

    `pool` is measured, `alone` simulated on the owner's clusters, both over the same `compared` jobs. `never_alone`
    jobs would not have run alone, since they are too large or not placed; `pool_only` is how long these waited.
    `unsized` jobs never had a plan. The figures are `final` once the month is over and none of its jobs is `open`.
    """

    owner: Name
    month: Annotated[str, Field(pattern=r"^\d{4}-\d{2}$")]
    final: bool
    users: NonNegativeInt
    jobs: NonNegativeInt
    open: NonNegativeInt
    unsized: NonNegativeInt
    compared: NonNegativeInt
    never_alone: NonNegativeInt
    pool: WaitFigures | None
    alone: WaitFigures | None
    pool_only: WaitFigures | None
    verdict: WaitVerdict

    @property
    def figures(self) -> dict[str, WaitFigures]:
        """The figures that there are, by what they are of."""
        named = {
            f"in the pool, {self.compared} jobs": self.pool,
            "alone, the same jobs (simulated)": self.alone,
            f"in the pool, {self.never_alone} jobs that alone would not have run": self.pool_only,
        }
        return {name: one for name, one in named.items() if one is not None}


class OwnerStatement(StatementView):
    """The statement of an owner with the waits of its own users; None: the operator lists none."""

    waits: OwnerWaits | None
