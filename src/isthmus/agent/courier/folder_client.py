"""`FolderClient`: decides what the worker's end of the courier sends next, from its folder's files and the answers.

Needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from isthmus.agent.courier.courier_frames import MAX_BODY_BYTES, Frame, FrameError, is_carried_name

EXIT = "exit"
"""The file that is carried last: the agent then has everything that the worker wrote."""

MIN_PIECE_BYTES = 64 << 10
"""Shortest piece of a longer file; a file up to this size is put in place at once."""

_TAIL_BYTES = 64
_SHORT_BYTES = 256 << 10


@dataclass(frozen=True)
class FileStat:
    """Inode, size and modification time of a file in the worker's folder."""

    inode: int
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True)
class Tracked:
    """A file that is carried: generation, inode, modification time, and the last bytes sent."""

    generation: int
    inode: int
    modified_ns: int
    tail: bytes = b""


@dataclass(frozen=True)
class Carry:
    """Send `num_bytes` of a file from `offset`, which follow the bytes `tail`; or that it was removed."""

    kind: Literal["put", "append", "remove"]
    name: str
    generation: int = 0
    offset: int = 0
    num_bytes: int = 0
    tail: bytes = b""

    def frame(self, data: bytes, age_s: float) -> Frame:
        """Return the frame that carries `data`, last written `age_s` ago."""
        fields: dict[str, Any] = {"name": self.name}
        if self.kind != "remove":
            fields |= {"generation": self.generation, "age_s": round(max(0.0, age_s), 3)}
        if self.kind == "append":
            fields["offset"] = self.offset
        return Frame(self.kind, fields, data)


class FolderClient:
    """The files that one folder sends. `tracked` is what an earlier process of the same worker had saved."""

    def __init__(self, tracked: Mapping[str, Tracked] | None = None) -> None:
        self.tracked: dict[str, Tracked] = dict(tracked or {})
        self._have: dict[str, tuple[int, int]] = {}
        self._taken: set[str] = set()
        self._piece_bytes = MAX_BODY_BYTES

    def welcome(self, frame: Frame) -> None:
        """Adopt what the agent has, which counts after every lost connection."""
        self._have = {}
        for name, found in frame.mapping("have").items():
            if not isinstance(found, list) or len(found) != 2 or not all(type(one) is int for one in found):
                raise FrameError(f"welcome: '{name}' has no generation and size")
            self._have[name] = found[0], found[1]

    def shrink(self) -> None:
        """Carry shorter pieces after a cut: on a link that breaks often or is slow, long ones would never arrive."""
        self._piece_bytes = max(MIN_PIECE_BYTES, self._piece_bytes // 2)

    def take(self, name: str) -> None:
        """Note that a file of the agent was put into the folder: it is not carried back."""
        self._taken.add(name)

    def drop(self, name: str) -> None:
        """Note that the agent's file `name` is gone."""
        self._taken.discard(name)

    @property
    def taken(self) -> frozenset[str]:
        """The agent's files in the folder."""
        return frozenset(self._taken)

    def next_carry(self, stats: Mapping[str, FileStat], *, ended: bool, later: Collection[str] = ()) -> Carry | None:
        """Return what to carry next, None if the agent has everything; `exit` goes last, once the worker has `ended`.

        `stats` are the files of the folder, read after the check whether the worker has ended. A file in `later`,
        which has just been carried, waits until there is more of it.
        """
        names = [name for name in stats if name not in self._taken and is_carried_name(name)]
        for name in names:
            carry = self._carry(name, stats[name]) if name != EXIT else None
            is_short = carry is not None and carry.kind == "append" and carry.num_bytes < _SHORT_BYTES
            if carry is not None and (ended or not is_short or name not in later):
                return carry
        for name in self._have:
            if name not in stats and name not in self._taken:
                return Carry("remove", name)
        return self._carry(EXIT, stats[EXIT]) if ended and EXIT in names else None

    def handle(self, carry: Carry, data: bytes, answer: Frame) -> None:
        """Take over the agent's answer to what was carried."""
        if answer.kind == "denied":  # not the worker's to write, or beyond a bound: it stays here
            self._taken.add(carry.name)
            return
        if answer.kind != "stored":
            raise FrameError(f"'{answer.kind[:40]}' in answer to '{carry.kind}'")
        if carry.kind == "remove":
            self._have.pop(carry.name, None)
            self.tracked.pop(carry.name, None)
            return
        generation, size = answer.number("generation"), answer.number("size")
        self._have[carry.name] = generation, size
        self._piece_bytes = min(MAX_BODY_BYTES, self._piece_bytes + MIN_PIECE_BYTES)
        known = self.tracked[carry.name]
        if (generation, size) == (carry.generation, carry.offset + len(data)):
            self.tracked[carry.name] = replace(known, tail=(known.tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:])
        else:
            self.tracked[carry.name] = replace(known, tail=b"")

    def rewrite(self, name: str) -> None:
        """Send a file again from its start, since its beginning has changed."""
        self._have.pop(name, None)

    def _carry(self, name: str, look: FileStat) -> Carry | None:
        known, (generation, size) = self.tracked.get(name), self._have.get(name, (0, 0))
        fits = known is not None and known.generation == generation and known.inode == look.inode
        if known is not None and fits and size <= look.num_bytes:
            if size < look.num_bytes:
                num_bytes = min(self._piece_bytes, look.num_bytes - size)
                self.tracked[name] = replace(known, modified_ns=look.modified_ns)
                return Carry("append", name, generation, size, num_bytes, known.tail)
            if known.modified_ns == look.modified_ns or size > MIN_PIECE_BYTES:
                return None
        # A file that is new, was replaced, has shrunk or was touched.
        following = 1 + max(generation, known.generation if known else 0)
        self.tracked[name] = Tracked(following, look.inode, look.modified_ns)
        return Carry("put", name, following, 0, min(self._piece_bytes, look.num_bytes))


def changed_files(listing: Frame, installed: Mapping[str, str]) -> tuple[list[tuple[str, str, int, int]], list[str]]:
    """Return the agent's files to fetch (name, stamp, size, mode), and the names of those that are gone.

    `installed` has the stamp of each file that is there. Raises `FrameError` for a listing that is malformed.
    """
    files, wanted = listing.mapping("files"), list[tuple[str, str, int, int]]()
    for name, found in files.items():
        if not is_carried_name(name) or not _is_file_entry(found):
            raise FrameError("the agent's listing is malformed")
        if installed.get(name) != found[0]:
            wanted.append((name, found[0], found[1], found[2] & 0o777))
    return wanted, _missing(installed, files)


def _missing(installed: Iterable[str], files: Mapping[str, Any]) -> list[str]:
    return [name for name in installed if name not in files]


def _is_file_entry(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != 3 or not isinstance(found[0], str):
        return False
    return all(type(one) is int and one >= 0 for one in found[1:])
