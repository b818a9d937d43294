"""`Region` and `Step`: what a collective moves and sums, and the messages that do it, as plain data.

A collective has an address space of elements that all ranks of a group share. A rank holds values of the elements
that it contributes, and ends with the values of those that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `[start, stop)`: each of the `receivers` ends with the sum over the `contributors`; ranks ascend."""

    start: int
    stop: int
    contributors: tuple[int, ...]
    receivers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"invalid {self}", hint="a region has at least one element")
        for ranks in (self.contributors, self.receivers):
            if not ranks or list(ranks) != sorted(set(ranks)):
                raise PlanError(f"invalid {self}", hint="at least one rank contributes and one receives, ascending")


@dataclass(frozen=True, slots=True)
class Step:
    """One message: in `round`, `sender` sends its values of elements `[start, stop)` to `receiver`.

    A rank sends what it holds after all earlier rounds. If the step `adds`, the receiver sums its own values and
    all that arrive in this round, in ascending order of ranks; otherwise the message replaces its values.
    """

    round: int
    sender: int
    receiver: int
    start: int
    stop: int
    adds: bool
