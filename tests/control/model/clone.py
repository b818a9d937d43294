"""`clone`: a copy of a mutable state that shares whatever is immutable; objects in it keep their identity."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from sortedcontainers import SortedDict, SortedList

from isthmus.control.accounts.account_tree import AccountTree
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.core.base_model import FrozenModel
from isthmus.site import DeviceIdAllocator, SiteMachine

Memo = dict[int, Any]
Copier = Callable[[Any, Memo], Any]

_OBJECTS: dict[type, tuple[str, ...]] = {
    SiteMachine: ("site", "next_due_s"),
    Coordinator: ("state", "admitted"),
    DeviceIdAllocator: ("_holder_by_device", "_claimer_by_device"),
}
"""Classes that are no data classes, with the attributes that change."""

_SHARED: set[type] = {str, int, float, bool, type(None), tuple, frozenset, AccountTree}
"""Types whose values need no copy; what immutable data is met is added."""


def clone(thing: Any, memo: Memo | None = None) -> Any:
    """Return a copy; tuples are taken to hold nothing mutable, and no container to be in two places."""
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
    if frozen or issubclass(kind, FrozenModel):
        _SHARED.add(kind)
        return None
    if is_dataclass(kind):
        _COPIERS[kind] = _written(kind, tuple(one.name for one in fields(kind)))
    elif kind in _OBJECTS:
        _COPIERS[kind] = _written(kind, _OBJECTS[kind])
    else:
        raise TypeError(f"cannot tell whether a {kind.__name__} may be shared")
    return _COPIERS[kind]


def _written(kind: type, names: tuple[str, ...]) -> Copier:
    """Return a copier that names each attribute, several times as fast as a loop over them.

    What is typed as a plain value is taken over without a look at it.
    """
    types = {one.name: str(one.type) for one in fields(kind)} if is_dataclass(kind) else {}
    lines = [
        f" y.{name} = x.{name}"
        if types.get(name) in _PLAIN
        else f" v = x.{name}; y.{name} = v if type(v) in shared else clone(v, memo)"
        for name in names
    ]
    text = "\n".join(("def copier(x, memo):", " y = memo[id(x)] = new(kind)", *lines, " return y"))
    scope: dict[str, Any] = {"new": object.__new__, "kind": kind, "shared": _SHARED, "clone": clone}
    exec(text, scope)
    copier: Copier = scope["copier"]
    return copier


_PLAIN = {f"{kind}{more}" for kind in ("str", "int", "float", "bool") for more in ("", " | None")}


def _dict(thing: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    copy = thing.copy()
    if not _SHARED.issuperset(map(type, copy.values())):
        for key, value in thing.items():
            copy[key] = clone(value, memo)
    return copy


def _list(thing: list[Any], memo: Memo) -> list[Any]:
    return [one if type(one) in _SHARED else clone(one, memo) for one in thing]


def _sorted_dict(thing: SortedDict, memo: Memo) -> SortedDict:
    copy = SortedDict()
    for key, value in thing.items():
        copy[key] = value
    return copy


def _sorted_list(thing: SortedList, memo: Memo) -> SortedList:
    copy = SortedList()
    if thing:
        copy.update(thing)
    return copy


def _device_ids(thing: DeviceIdAllocator, memo: Memo) -> DeviceIdAllocator:
    """Share the inventory, which never changes."""
    copy = memo[id(thing)] = object.__new__(DeviceIdAllocator)
    copy.__dict__.update(thing.__dict__)
    copy.__dict__.update({name: dict(thing.__dict__[name]) for name in _OBJECTS[DeviceIdAllocator]})
    return copy


_COPIERS: dict[type, Copier] = {
    DeviceIdAllocator: _device_ids,
    dict: _dict,
    list: _list,
    set: lambda thing, memo: thing.copy(),
    SortedList: _sorted_list,
    SortedDict: _sorted_dict,
    deque: lambda thing, memo: deque(thing, thing.maxlen),
}


Shelf = dict[tuple[Any, ...], Any]
"""One of each container that holds immutable values only, by its content."""


def share(thing: Any, shelf: Shelf) -> Any:
    """Return what stands for `thing`: have whatever is in it that is on the shelf be the same as there.

    For states that are kept and no longer change: `clone` copies what is shared.
    """
    kind = type(thing)
    if kind in _SHARED or (kind not in _COPIERS and _learn(kind) is None):
        return thing
    if kind is dict:
        if not _SHARED.issuperset(map(type, thing.values())):
            for name, value in thing.items():
                thing[name] = share(value, shelf)
        contents = (kind, *thing.items())
    elif kind in (list, set, SortedList):
        contents = (kind, *thing)
    elif kind is SortedDict:
        contents = (kind, *thing.items())
    else:
        for name in _attributes(kind):
            value = getattr(thing, name)
            if type(value) not in _SHARED:
                setattr(thing, name, share(value, shelf))
        return thing
    try:
        return shelf.setdefault(contents, thing)
    except TypeError:  # something in it can change
        return thing


@cache
def _attributes(kind: type) -> tuple[str, ...]:
    """Return the attributes that may hold something that can change."""
    if kind in _OBJECTS:
        return _OBJECTS[kind]
    return tuple(one.name for one in fields(kind) if str(one.type) not in _PLAIN)
