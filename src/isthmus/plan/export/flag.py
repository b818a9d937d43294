"""`Flag`: a command-line option with its values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """A command-line option with its values; a switch has none."""

    name: str
    values: tuple[str, ...] = ()

    def as_words(self) -> tuple[str, ...]:
        """Return the option as separate arguments."""
        return (f"--{self.name}", *self.values)


def flag(name: str, *values: object) -> Flag:
    """Return a `Flag` with its values converted to text."""
    return Flag(name, tuple(str(value) for value in values))
