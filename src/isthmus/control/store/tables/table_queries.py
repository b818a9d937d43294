"""`TableQueries`: the statements that a store with SQL tables runs; a database says how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

Session = TypeVar("Session")


class TableQueries(ABC, Generic[Session]):
    """Reads and writes of tables. `Session` is an open connection; statements mark each value with `?`."""

    @abstractmethod
    def _read(self, sql: str, *values: Any) -> list[Any]:
        """Return the rows of a query."""

    @abstractmethod
    def _write(self, write: Callable[[Session], Any]) -> Any:
        """Return the result of `write`, which runs in a transaction; it is on disk by then."""

    @abstractmethod
    def _execute(self, session: Session, sql: str, *values: Any) -> Any:
        """Run a statement inside `_write`; return its cursor."""

    @abstractmethod
    def _execute_many(self, session: Session, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run a statement inside `_write` once for each row of values."""
