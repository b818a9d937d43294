"""The ledger beside an owner's own records: what `isthmus ledger compare` prints."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, NonNegativeInt


class DifferenceView(FrozenModel):
    """From `begin_ms` to `end_ms` the ledger has `ours` chips of a part, the record `theirs`."""

    begin_ms: int
    end_ms: int
    ours: NonNegativeInt
    theirs: NonNegativeInt
    cause: str


class HeldSpan(FrozenModel):
    """Chips held from `begin_ms` to `end_ms`; `source` names the place in the record."""

    chips: NonNegativeInt
    begin_ms: int
    end_ms: int
    source: str = ""


class ComparedPartView(FrozenModel):
    """Both accounts of a part of a job at the site."""

    job: str
    attempt: NonNegativeInt
    ours: tuple[HeldSpan, ...]
    theirs: tuple[HeldSpan, ...]
    differences: tuple[DifferenceView, ...]


class CauseSum(FrozenModel):
    """The differences of a cause: how many, and chip-hours that the ledger has more (below 0: less)."""

    cause: str
    differences: NonNegativeInt
    chip_hours: float


class RecordsView(FrozenModel):
    """The result: chip-hours of both, the difference in percent of the record, and the parts that differ or agree.

    Parts that still hold cards are counted in `still_held` and not compared.
    """

    site: str
    month: str
    record: str
    parts: tuple[ComparedPartView, ...]
    still_held: NonNegativeInt
    ours_chip_hours: float
    theirs_chip_hours: float
    percent: float
    causes: tuple[CauseSum, ...]
    unexplained: NonNegativeInt
