"""`decode_inert`: the objects of a pickle as inert records; nothing is imported, constructed or called.

Checkpoints of layout 2 have their layout in `.metadata`, a pickle that torch wrote. This decoder interprets the
opcodes that such a file needs on a stack of plain values. A class or function is a name of an allow-list, and its
call is a `Record` of that name with the arguments; every other name or opcode is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

MAX_OPCODES = 64_000_000


class InertPickleError(ValueError):
    """A pickle with a name or opcode that is not allowed, or one that is malformed."""


@dataclass(frozen=True)
class Name:
    """A class or function by its allowed name; never the object itself."""

    name: str


@dataclass(eq=False)
class Record:
    """An object as data: the name of its class, the arguments of its construction, and its state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


_MARK: Final = object()


def decode_inert(data: bytes, names: Mapping[tuple[str, str], str]) -> Any:
    """Return what the pickle `data` describes; `names` maps allowed (module, name) to names of records.

    Raises `InertPickleError` for any other name, for an opcode outside the supported ones, and for damage.
    """
    decoder = _Decoder(names)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number >= MAX_OPCODES:
                raise InertPickleError(f"it has more than {MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                return decoder.pop()
            decoder.apply(opcode.name, argument)
    except InertPickleError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise InertPickleError(f"it is damaged: {error}") from error
    raise InertPickleError("it has no end")


class _Decoder:
    """The stack and the memo of a pickle."""

    def __init__(self, names: Mapping[tuple[str, str], str]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def apply(self, opcode: str, argument: Any) -> None:
        """Apply one opcode."""
        if opcode in ("PROTO", "FRAME"):
            return
        if opcode in _PUSHES_ARGUMENT:
            self._stack.append(argument)
        elif opcode in _PUSHES:
            self._stack.append(_PUSHES[opcode]())
        elif opcode in self._ACTIONS:
            self._ACTIONS[opcode](self, argument)
        else:
            raise InertPickleError(f"opcode {opcode} is not allowed")

    def pop(self) -> Any:
        """Remove and return the top of the stack."""
        value = self._stack.pop()
        if value is _MARK:
            raise InertPickleError("it is damaged: a mark in place of a value")
        return value

    def _pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise InertPickleError("it is damaged: a mark is missing")
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _tuple(self, count: int) -> None:
        found = tuple(self.pop() for _ in range(count))
        self._stack.append(found[::-1])

    def _global(self, module: Any, name: Any) -> None:
        allowed = self._names.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if allowed is None:
            raise InertPickleError(f"the name {str(module)[:80]}.{str(name)[:80]} is not allowed")
        self._stack.append(Name(allowed))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._global(module, name)

    def _global_text(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self._global(module, name)

    def _construct(self, _: Any) -> None:
        arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, Name) or not isinstance(arguments, tuple):
            raise InertPickleError("it calls what is no allowed name")
        self._stack.append(Record(kind.name, arguments))

    def _build(self, _: Any) -> None:
        state, target = self.pop(), self._top(Record)
        target.state = state

    def _append(self, _: Any) -> None:
        value = self.pop()
        self._top(list).append(value)

    def _appends(self, _: Any) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def _set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self._top(dict)[_hashable(key)] = value

    def _set_items(self, _: Any) -> None:
        found = self._pop_to_mark()
        target = self._top(dict)
        for key, value in zip(found[::2], found[1::2], strict=True):
            target[_hashable(key)] = value

    def _top(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise InertPickleError(f"it is damaged: {kind.__name__.lower()} expected")
        return self._stack[-1]

    def _memoize(self, argument: Any) -> None:
        at = len(self._memo) if argument is None else argument
        if self._stack[-1] is _MARK:
            raise InertPickleError("it is damaged: a mark in place of a value")
        self._memo[at] = self._stack[-1]

    _ACTIONS: ClassVar[dict[str, Callable[[_Decoder, Any], None]]] = {
        "MARK": lambda self, _: self._stack.append(_MARK),
        "TUPLE1": lambda self, _: self._tuple(1),
        "TUPLE2": lambda self, _: self._tuple(2),
        "TUPLE3": lambda self, _: self._tuple(3),
        "TUPLE": lambda self, _: self._stack.append(tuple(self._pop_to_mark())),
        "MEMOIZE": _memoize,
        "BINPUT": _memoize,
        "LONG_BINPUT": _memoize,
        "BINGET": lambda self, at: self._stack.append(self._memo[at]),
        "LONG_BINGET": lambda self, at: self._stack.append(self._memo[at]),
        "STACK_GLOBAL": _stack_global,
        "GLOBAL": _global_text,
        "NEWOBJ": _construct,
        "REDUCE": _construct,
        "BUILD": _build,
        "APPEND": _append,
        "APPENDS": _appends,
        "SETITEM": _set_item,
        "SETITEMS": _set_items,
    }


_PUSHES_ARGUMENT = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_PUSHES: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}


def _hashable(key: Any) -> Any:
    """Return a key of a mapping: text, a number or a record; hashing a deeply nested tuple would recurse."""
    if not isinstance(key, str | int | Record):
        raise InertPickleError("it is damaged: a mapping has a key of another kind")
    return key
