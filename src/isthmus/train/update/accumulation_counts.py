"""`AccumulationCounts`: which gradients of a step are final, known from how often each was added to in the last one."""

from __future__ import annotations


class AccumulationCounts:
    """How often each parameter's gradient is added to in a step.

    A step does the same as the one before, so a gradient is final once it has been added to as often as then; in the
    first step, and after one that failed, none is final before the end. A tied embedding may be added to twice in a
    micro-batch, a parameter without gradient never.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}
        self._counted: dict[str, int] = {}

    def add(self, name: str) -> bool:
        """Count one addition to the gradient of `name`; return whether it is final.

        Raises `RuntimeError` if it was final before: its sum may be under way.
        """
        count = self._counted[name] = self._counted.get(name, 0) + 1
        expected = self._expected.get(name, 0)
        if 0 < expected < count:
            raise RuntimeError(
                f"the gradient of {name} is added to {count} times in a step, {expected} in the last one"
            )
        return count == expected

    def is_final(self, name: str) -> bool:
        """Return whether the gradient of `name` is final."""
        return 0 < self._expected.get(name, 0) == self._counted.get(name, 0)

    def end_step(self) -> None:
        """End a complete step, which the next one repeats."""
        self._expected, self._counted = self._counted, {}

    def discard_step(self) -> None:
        """Forget the additions of a step that failed."""
        self._counted = {}
