"""`clone`: a copy of a mutable state that shares whatever is immutable, and keeps what is shared shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from sortedcontainers import SortedDict, SortedList

from isthmus.agent.cards import Cards
from isthmus.agent.machine import AgentMachine
from isthmus.control.coordinator import Coordinator
from isthmus.core.base import Frozen

Memo = dict[int, Any]
Copier = Callable[[Any, Memo], Any]

_OBJECTS = (AgentMachine, Coordinator)
_SHARED: set[type] = {str, int, float, bool, type(None), tuple, frozenset, Cards}
"""Types whose values need no copy; what immutable data is met is added."""


def clone(thing: Any, memo: Memo | None = None) -> Any:
    """Return a copy; tuples are taken to hold nothing mutable."""
    kind = type(thing)
    if kind in _SHARED:
        return thing
    memo = {} if memo is None else memo
    known = memo.get(id(thing))
    if known is not None:
        return known
    copier = _COPIERS.get(kind) or _learn(kind)
    return thing if copier is None else copier(thing, memo)


def _learn(kind: type) -> Copier | None:
    """Return how a kind of object is copied, None where it is shared; raise where that is not known."""
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if frozen or issubclass(kind, Frozen):
        _SHARED.add(kind)
        return None
    if is_dataclass(kind):
        names = tuple(one.name for one in fields(kind))
        _COPIERS[kind] = lambda thing, memo: _fill(thing, names, memo)
    elif kind in _OBJECTS:
        _COPIERS[kind] = lambda thing, memo: _fill(thing, tuple(vars(thing)), memo)
    else:
        raise TypeError(f"cannot tell whether a {kind.__name__} may be shared")
    return _COPIERS[kind]


def _fill(thing: Any, names: tuple[str, ...], memo: Memo) -> Any:
    copy = memo[id(thing)] = object.__new__(type(thing))
    for name in names:
        value = getattr(thing, name)
        setattr(copy, name, value if type(value) in _SHARED else clone(value, memo))
    return copy


def _dict(thing: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    copy = memo[id(thing)] = {}
    for key, value in thing.items():
        copy[key] = value if type(value) in _SHARED else clone(value, memo)
    return copy


def _list(thing: list[Any], memo: Memo) -> list[Any]:
    copy = memo[id(thing)] = [one if type(one) in _SHARED else clone(one, memo) for one in thing]
    return copy


_COPIERS: dict[type, Copier] = {
    dict: _dict,
    list: _list,
    set: lambda thing, memo: memo.setdefault(id(thing), set(thing)),
    SortedList: lambda thing, memo: memo.setdefault(id(thing), SortedList(thing)),
    SortedDict: lambda thing, memo: memo.setdefault(id(thing), SortedDict(thing)),
    deque: lambda thing, memo: memo.setdefault(id(thing), deque(thing, thing.maxlen)),
}
