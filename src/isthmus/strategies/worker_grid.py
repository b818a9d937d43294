"""`WorkerGrid`: the hosts, chips and aggregators that a named strategy plans for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from isthmus.core.errors import InputError

Range = tuple[int, int]
"""First element and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class WorkerGrid:
    """`hosts` of `chips` workers each, which sum `num_elements` elements, and `num_aggregators` aggregators.

    Participants are numbered: workers by host (worker `c` of host `h` is `h * chips + c`), then aggregators. An
    aggregator is a parameter server or a switch. A switch holds `num_slots` slots of `slot_elements` elements for
    this sum; None stands for slots enough for all elements.
    """

    hosts: int
    chips: int
    num_elements: int
    num_aggregators: int = 1
    num_slots: int | None = None
    slot_elements: int = 64

    def __post_init__(self) -> None:
        counts = {
            "hosts": self.hosts,
            "chips": self.chips,
            "num_aggregators": self.num_aggregators,
            "num_slots": 1 if self.num_slots is None else self.num_slots,
            "slot_elements": self.slot_elements,
        }
        for name, value in counts.items():
            if value < 1:
                raise InputError(f"{name} is {value}", hint=f"{name} is at least 1")
        if self.num_elements < 0:
            raise InputError(f"num_elements is {self.num_elements}", hint="num_elements is at least 0")

    @property
    def num_workers(self) -> int:
        """Number of workers on all hosts."""
        return self.hosts * self.chips

    @property
    def everything(self) -> Range:
        """The range of all elements."""
        return 0, self.num_elements

    def host(self, host: int) -> list[int]:
        """Return the workers of `host`, in the order of its ring."""
        return list(range(host * self.chips, (host + 1) * self.chips))

    def column(self, chip: int) -> list[int]:
        """Return the worker `chip` of every host."""
        return list(range(chip, self.num_workers, self.chips))

    def aggregator(self, number: int) -> int:
        """Return the participant that is aggregator `number`."""
        return self.num_workers + number


def chunks(elements: Range, num: int) -> list[Range]:
    """Return `elements` as `num` ranges of almost equal size in ascending order; some are empty if elements are few."""
    start, stop = elements
    ends = [start + (stop - start) * place // num for place in range(num + 1)]
    return list(pairwise(ends))
