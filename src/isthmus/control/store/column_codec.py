"""`column_codec`: data classes, models and containers as columns of JSON values, with their type hints as the schema.

Equal fields of many records lie in one column (as in Dremel, Melnik et al. 2010, and Apache Arrow), so that loops over
them run in the interpreter's C code. Decoding creates the classes of the schema and nothing else: every value is
checked against its hint, data name no class, function or module, and no count exceeds the length of some column.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, chain, pairwise, repeat, starmap
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

import pydantic
from sortedcontainers import SortedDict, SortedList

_items = operator.methodcaller("items")
Derived = frozenset[tuple[type, str]]
"""Fields, as (class, name), that are left at their defaults: the caller derives them from others."""

_SEQUENCES: dict[Any, Callable[[Iterable[Any]], Any]] = {
    tuple: tuple, list: list, set: set, frozenset: frozenset, SortedList: SortedList,
}  # fmt: skip
_MAPPINGS: dict[Any, Callable[[Iterable[Any]], Any]] = {dict: dict, Mapping: dict, SortedDict: SortedDict}
_SCALARS: dict[Any, frozenset[type]] = {
    str: frozenset({str}), int: frozenset({int}), bool: frozenset({bool}), float: frozenset({float, int}),
}  # fmt: skip


class ColumnCodec(Protocol):
    """Converts a column of values to JSON and back."""

    def encode(self, values: list[Any]) -> Any:
        """Return the values as JSON."""

    def decode(self, data: Any, count: int) -> list[Any]:
        """Return `count` values; raise `ValueError` or `TypeError` for data that do not fit the schema."""


def column_codec(hint: Any, derived: Derived = frozenset()) -> ColumnCodec:
    """Return the codec of a type hint; raise `TypeError` for a hint that it does not know."""
    return _Compiler(derived).compile(hint)


class _Compiler:
    def __init__(self, derived: Derived) -> None:
        self._derived, self._records = derived, dict[type, ColumnCodec]()

    def compile(self, hint: Any) -> ColumnCodec:
        origin, of = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._annotated(*of)
        if hint in _SCALARS:
            return _Scalars(_SCALARS[hint])
        if hint in (None, types.NoneType):
            return _Nones()
        if hint is bytes:
            return _Texts(bytes.decode, str.encode)
        if origin is Literal:
            return _Scalars(frozenset(map(type, of)), frozenset(of))
        if origin in (Union, types.UnionType):
            return self._optional(hint, of)
        if origin is tuple and of[-1] is not Ellipsis:
            return _Rows([self.compile(one) for one in of], tuple)
        if origin in _SEQUENCES:
            return _Sequences(self.compile(of[0]), _SEQUENCES[origin])
        if origin in _MAPPINGS:
            return _Sequences(_Rows([self.compile(one) for one in of], tuple), _MAPPINGS[origin], _items)
        return self._of_class(hint)

    def _annotated(self, hint: Any, *of: Any) -> ColumnCodec:
        """Return the codec of a sorted container, whose classes are not generic: the items' hint is annotated."""
        if hint is SortedList:
            return _Sequences(self.compile(of[0]), SortedList)
        if hint is SortedDict:
            return _Sequences(_Rows([self.compile(one) for one in of], tuple), SortedDict, _items)
        return self.compile(hint)

    def _optional(self, hint: Any, of: tuple[Any, ...]) -> ColumnCodec:
        rest = [one for one in of if one is not types.NoneType]
        if len(rest) != 1 or len(of) != 2:
            raise TypeError(f"{hint} is not stored in a snapshot")
        return _Optionals(self.compile(rest[0]))

    def _of_class(self, hint: Any) -> ColumnCodec:
        if not isinstance(hint, type):
            raise TypeError(f"{hint} is not stored in a snapshot")
        if issubclass(hint, pydantic.BaseModel):
            return _Texts(functools.partial(hint.model_dump_json, by_alias=True), hint.model_validate_json)
        if issubclass(hint, tuple) and hasattr(hint, "parse"):
            return _Texts(str, hint.parse)
        if not dataclasses.is_dataclass(hint):
            raise TypeError(f"{hint} is not stored in a snapshot")
        if hint not in self._records:
            hints = get_type_hints(hint, include_extras=True)
            fields = [one for one in dataclasses.fields(hint) if one.repr]
            self._records[hint] = _Records(
                hint,
                {one.name: self.compile(hints[one.name]) for one in fields if (hint, one.name) not in self._derived},
            )
        return self._records[hint]


@dataclasses.dataclass(frozen=True)
class _Scalars:
    """A column of JSON values of these `types`, one of `allowed` if there are any."""

    types: frozenset[type]
    allowed: frozenset[Any] | None = None

    def encode(self, values: list[Any]) -> Any:
        return _with_table(values) if str in self.types else values

    def decode(self, data: Any, count: int) -> list[Any]:
        if isinstance(data, dict):
            return _from_table(data, self._check(data["texts"]), count)
        found = self._check(data)
        _require(len(found) == count, "the length of a column")
        return found

    def _check(self, values: Any) -> list[Any]:
        _require(isinstance(values, list), "a column")
        _require(set(map(type, values)) <= self.types, "the type of a value")
        _require(self.allowed is None or set(values) <= self.allowed, "a value")
        return values  # type: ignore[no-any-return]


class _Nones:
    """A column of None, the values of a dictionary used as an ordered set; the column of its keys bounds `count`."""

    def encode(self, values: list[Any]) -> Any:
        return len(values)

    def decode(self, data: Any, count: int) -> list[Any]:
        _require(data == count, "the length of a column")
        return [None] * count


class _Texts:
    """A column of values that have a text form; equal ones are stored and parsed once."""

    def __init__(self, to_text: Callable[[Any], str], parse: Callable[[str], Any]) -> None:
        self._to_text, self._parse, self._column = to_text, parse, _Scalars(frozenset({str}))

    def encode(self, values: list[Any]) -> Any:
        known: dict[int, str] = {}  # by identity: `values` keep their objects alive
        for one in values:
            if id(one) not in known:
                known[id(one)] = self._to_text(one)
        return self._column.encode([known[id(one)] for one in values])

    def decode(self, data: Any, count: int) -> list[Any]:
        texts = self._column.decode(data, count)
        parsed = {text: self._parse(text) for text in dict.fromkeys(texts)}
        return [parsed[text] for text in texts]


class _Optionals:
    """A column of values or None: 1 or 0 for each, and the column of the values."""

    def __init__(self, present: ColumnCodec) -> None:
        self._present = present

    def encode(self, values: list[Any]) -> Any:
        present = [one for one in values if one is not None]
        return [[int(one is not None) for one in values], self._present.encode(present)]

    def decode(self, data: Any, count: int) -> list[Any]:
        mask, present = data
        _check_integers(mask, 2)
        _require(len(mask) == count, "the length of a column")
        left = iter(self._present.decode(present, sum(mask)))
        return [next(left) if one else None for one in mask]


class _Rows:
    """A column of tuples of equal length: a column for each place."""

    def __init__(self, columns: list[ColumnCodec], make: Callable[[Iterable[Any]], Any]) -> None:
        self._columns, self._make = columns, make

    def encode(self, values: list[Any]) -> Any:
        return [codec.encode([row[place] for row in values]) for place, codec in enumerate(self._columns)]

    def decode(self, data: Any, count: int) -> list[Any]:
        columns = [codec.decode(one, count) for codec, one in zip(self._columns, data, strict=True)]
        return list(map(self._make, zip(*columns, strict=True)))


class _Sequences:
    """A column of containers: their lengths, and one column of all items."""

    def __init__(
        self,
        items: ColumnCodec,
        make: Callable[[Iterable[Any]], Any],
        iterate: Callable[[Any], Iterable[Any]] = iter,
    ) -> None:
        self._items, self._make, self._iterate = items, make, iterate

    def encode(self, values: list[Any]) -> Any:
        items = list(chain.from_iterable(map(self._iterate, values)))
        return [list(map(len, values)), self._items.encode(items)]

    def decode(self, data: Any, count: int) -> list[Any]:
        lengths, items = data
        _require(isinstance(lengths, list) and len(lengths) == count, "the length of a column")
        _check_integers(lengths)
        found = self._items.decode(items, sum(lengths))
        ends = accumulate(lengths, initial=0)
        return [self._make(found[first:last]) for first, last in pairwise(ends)]


class _Records:
    """A column of data classes: a column for each field; a field that has its default in every record is left out."""

    def __init__(self, cls: type, columns: dict[str, ColumnCodec]) -> None:
        self._cls, self._columns = cls, columns
        self._first = next(iter(columns))
        self._setters = {one.name: _setter(cls, one.name) for one in dataclasses.fields(cls)}
        self._defaults = {one.name: _defaults(one) for one in dataclasses.fields(cls)}

    def encode(self, values: list[Any]) -> Any:
        found = {}
        for name, codec in self._columns.items():
            column = list(map(operator.attrgetter(name), values))
            if name == self._first or not self._is_default(name, column):
                found[name] = codec.encode(column)
        return found

    def decode(self, data: Any, count: int) -> list[Any]:
        _require(isinstance(data, dict) and set(data) <= set(self._columns), "the name of a field")
        first = self._columns[self._first].decode(data[self._first], count)  # its length bounds `count`
        records: list[Any] = list(map(object.__new__, repeat(self._cls, count)))
        for name, setter in self._setters.items():
            if name == self._first:
                column: Iterable[Any] = first
            elif name in data:
                column = self._columns[name].decode(data[name], count)
            else:
                defaults = self._defaults[name]
                if defaults is None:
                    raise ValueError(f"the field '{name}' is missing")
                column = defaults(count)
            deque(map(setter, records, column), maxlen=0)
        return records

    def _is_default(self, name: str, column: list[Any]) -> bool:
        defaults = self._defaults[name]
        if defaults is None:
            return False
        default = next(defaults(1))
        return column[:1] == [default] and column.count(default) == len(column)


def _setter(cls: type, name: str) -> Callable[[Any, Any], None]:
    """Return what sets a field of a new record, also of a frozen class."""
    slot = getattr(cls, name, None)
    if isinstance(slot, types.MemberDescriptorType):
        return slot.__set__
    return lambda record, value: object.__setattr__(record, name, value)


def _defaults(field: dataclasses.Field[Any]) -> Callable[[int], Iterator[Any]] | None:
    """Return what yields as many defaults of a field as its argument says, None if it has none."""
    make, value = field.default_factory, field.default
    if make is not dataclasses.MISSING:
        return lambda count: starmap(make, repeat((), count))
    return None if value is dataclasses.MISSING else functools.partial(repeat, value)


def _with_table(values: list[Any]) -> Any:
    """Return texts of which many are equal as a table of the different ones and the place of each in it."""
    places = {text: place for place, text in enumerate(dict.fromkeys(values))}
    if 2 * len(places) > len(values):
        return values
    return {"texts": list(places), "at": [places[text] for text in values]}


def _from_table(data: dict[str, Any], texts: list[Any], count: int) -> list[Any]:
    at = data["at"]
    _check_integers(at, len(texts))
    _require(len(at) == count, "the length of a column")
    return [texts[place] for place in at]


def _check_integers(values: Any, below: int | None = None) -> None:
    """Raise `ValueError` unless these are integers from 0, and smaller than `below`."""
    _require(isinstance(values, list) and set(map(type, values)) <= {int}, "a column of places")
    _require(not values or (min(values) >= 0 and (below is None or max(values) < below)), "a place")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} does not fit the schema")
