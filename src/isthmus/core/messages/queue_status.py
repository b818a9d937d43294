"""`Standing`: where a job stands in the queue, as its user sees it: why, behind whom, until when."""

from __future__ import annotations

from pydantic import Field

from isthmus.core.base import Count, Frozen, Index, Name
from isthmus.core.messages.api_views import JobState, VictimView
from isthmus.core.plan import PlanSet, Refusal
from isthmus.core.priority import Priority


class Ahead(Frozen):
    """A job that goes before another. `job` is None where it is another user's."""

    job: Name | None = None
    state: JobState
    priority: Priority


class Standing(Frozen):
    """Where a job that does not run yet stands.

    `place` is its place among the jobs that wait for chips, 1 the first (None: it is not among them, `reason`
    says why). `refused` says what it lacks, which stage of co-scheduling found so, and at which owner.
    `needs` are the chips that it waits for, by cluster and node group. `ahead` are the first of those before
    it that want chips of the same node groups. It should start at `start_s`; nine of ten such jobs start
    between `earliest_s` and `latest_s` where runs take up to a fifth more or less than predicted (seconds of
    the epoch; None: nothing that is known starts it). `notes` say what the times rest on.
    """

    id: Name
    name: Name
    user: Name
    state: JobState
    priority: Priority
    submitted_s: float
    reason: str = ""
    place: Count | None = None
    refused: tuple[Refusal, ...] = ()
    needs: dict[Name, dict[Name, Index]] = Field(default_factory=dict)
    ahead: tuple[Ahead, ...] = ()
    start_s: float | None = None
    earliest_s: float | None = None
    latest_s: float | None = None
    notes: tuple[str, ...] = ()


class DryRun(Frozen):
    """What would become of a job if it were submitted now; nothing was changed.

    Where no plan fits what is free, `plans` are those it would have to wait for. `standing` is that of the
    first of them, `victims` are those whose chips it could have for that one at once, if its user agreed:
    none where it needs nobody's, or where nobody's would do.
    """

    plans: PlanSet
    standing: Standing
    victims: tuple[VictimView, ...] = ()
