"""`Flag`: an option of a command line, as words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """An option of a command line with its values; a switch has none."""

    name: str
    values: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Return the option as separate words."""
        return (f"--{self.name}", *self.values)


def flag(name: str, *values: object) -> Flag:
    """Return an option with its values as text."""
    return Flag(name, tuple(str(value) for value in values))
