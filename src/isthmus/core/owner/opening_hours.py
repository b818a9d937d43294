"""`OpeningHours`: a daily time window of a site, in its own time."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
TimeOfDay = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]

DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class OpeningHours(FrozenModel):
    """A daily time window in `HH:MM` site time on each of `days`.

    An end that is not after the start falls on the next day.
    """

    days: tuple[Day, ...] = DAYS
    begin: TimeOfDay = Field("00:00", alias="from")
    end: TimeOfDay = Field("00:00", alias="to")

    def contains(self, moment: datetime) -> bool:
        """Return whether `moment`, in site time, is inside the window."""
        time, day = moment.strftime("%H:%M"), moment.weekday()
        today, yesterday = DAYS[day] in self.days, DAYS[day - 1] in self.days
        if self.begin < self.end:
            return today and self.begin <= time < self.end
        return (today and time >= self.begin) or (yesterday and time < self.end)
