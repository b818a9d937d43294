"""What the fuzzers share: bytes and documents that lie, and how long each parser is tried."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from isthmus.core.errors import FileError

LIMIT_CPU_S = 2.0
MAX_GROWTH_BYTES = 400 * 2**20
ROUND_EXAMPLES = 200

numbers = st.integers() | st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**300, -1, 0]) | st.floats()
words = st.text(max_size=20) | st.sampled_from(["../x", "/etc/passwd", "a" * 5000, "\x00", "\ud800", "NaN", "²", "٣"])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a document."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return the document with another value at a path."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@st.composite
def changed_bytes(draw: st.DrawFn, seed: bytes) -> bytes:
    """Return `seed` with some bytes replaced, cut, or repeated."""
    begin = draw(st.integers(0, len(seed)))
    end = min(len(seed), begin + draw(st.integers(0, 40)))
    middle = draw(st.binary(max_size=40) | st.just(seed[begin:end] * draw(st.sampled_from([0, 2, 300]))))
    return seed[:begin] + middle + (b"" if draw(st.booleans()) and draw(st.booleans()) else seed[end:])


def inputs(seed: bytes) -> st.SearchStrategy[bytes]:
    """Return what a parser of `seed` is given."""
    drawn = st.binary(max_size=300) | changed_bytes(seed)
    deep = st.sampled_from(
        [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900, b"", b"null", b"[]", b"1" * 9999]
    )
    whole_values = values.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    try:
        document = json.loads(seed)
    except ValueError:
        return drawn | deep | whole_values
    paths = list(places(document))
    mutants = st.tuples(st.sampled_from(paths), values).map(
        lambda change: json.dumps(replaced(document, *change)).encode("utf-8", "surrogatepass")
    )
    return drawn | deep | whole_values | mutants | mutants


def of(model: BaseModel) -> bytes:
    """Return a valid message."""
    return model.model_dump_json(by_alias=True).encode()


@dataclass(frozen=True)
class Parser:
    """How bytes are parsed in a new folder, a valid input, and the errors that the parser documents."""

    parse: Callable[[bytes, Path], object]
    seed: bytes
    errors: tuple[type[Exception], ...]


def at(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Return a parser of a file `name` of a folder; `read` gets the folder's path."""

    def parse(data: bytes, folder: Path) -> object:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return read(folder)

    return parse


def user_file(load: Callable[[Path], object], seed: bytes) -> Parser:
    """Return the parser of a YAML file."""
    return Parser(at("file.yaml", lambda folder: load(folder / "file.yaml")), seed, (FileError,))


@dataclass(frozen=True)
class Fuzz:
    """How long a parser is tried: a few inputs, with `whole` many, or new ones for `seconds` of CPU time."""

    whole: bool
    seconds: float

    def __call__(
        self,
        drawn: st.SearchStrategy[Any],
        check: Callable[[Any], None],
        *,
        examples: int = 20,
        whole_examples: int = 3000,
    ) -> None:
        """Call `check` with inputs."""
        limits = settings(suppress_health_check=list(HealthCheck), database=None, deadline=None)
        if not self.seconds:
            settings(limits, max_examples=whole_examples if self.whole else examples)(given(drawn)(check))()
            return
        limits = settings(limits, max_examples=ROUND_EXAMPLES, derandomize=False)
        until_s, count = time.process_time() + self.seconds, 0
        while time.process_time() < until_s:
            seed(count)(limits(given(drawn)(check)))()
            count += 1


def fuzz_parser(parser: Parser, folder: Path, fuzz: Fuzz) -> None:
    """Check that each input ends with a value or an error of the parser, in bounded time and memory."""

    def parse_any(data: bytes) -> None:
        began_s = time.process_time()
        with suppress(parser.errors):
            parser.parse(data, folder)
        assert time.process_time() - began_s < LIMIT_CPU_S

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(inputs(parser.seed), parse_any)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 < MAX_GROWTH_BYTES
