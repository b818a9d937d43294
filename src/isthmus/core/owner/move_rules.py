"""`MoveRules`: when running jobs of the pool may be moved to other devices of their site, in `policy.yaml`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat
from isthmus.core.owner.opening_hours import OpeningHours


class MoveRules(FrozenModel):
    """Limits of moves: a job is saved, ended and started again on other devices, so that a waiting one has a place.

    At most `at_once` jobs move for a waiting one (0: none ever), and at most `per_hour` in an hour. A waiting job has
    lacked nothing but a place for `after_s`, and has lost more by it, in card-seconds, than the moves cost: all cards
    of each moved job for `pause_s`. A job stays where it has started for at least `rest_s`. Moves begin within `hours`,
    in site time; an empty list means always. Jobs of `exempt_users` stay, and so do jobs that are not `preemptible`.
    """

    at_once: Annotated[NonNegativeInt, Field(le=20)] = 0
    per_hour: Annotated[NonNegativeInt, Field(le=1000)] = 4
    rest_s: NonNegativeFloat = 1800.0
    after_s: NonNegativeFloat = 60.0
    pause_s: PositiveFloat = 120.0
    hours: tuple[OpeningHours, ...] = ()
    exempt_users: tuple[Name, ...] = ()

    def is_open(self, moment: datetime) -> bool:
        """Return whether moves may begin at `moment`, in site time."""
        return not self.hours or any(hours.contains(moment) for hours in self.hours)
