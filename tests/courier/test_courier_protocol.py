"""The courier's protocol without a network: what is carried, in which order, and what cuts and repeats change."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.agent.courier.courier_frames import MAX_BODY_BYTES, VERSION, Frame, FrameError, pack_frame, read_frame
from isthmus.agent.courier.folder_client import FileStat, FolderClient, changed_files
from isthmus.agent.courier.folder_server import FolderServer, Leases
from isthmus.agent.courier.run_folder_files import RunFolderFiles
from isthmus.agent.courier.work_folder import read_piece, replace_file, replace_paths

pytestmark = pytest.mark.integration

INSTANCE = "ab" * 32
HELLO = Frame("hello", {"version": VERSION, "instance": INSTANCE, "host": "node-1"})


class CutError(Exception):
    """The connection of a test breaks."""


def reader(data: bytes) -> Callable[[int], bytes]:
    """Return a function that receives exactly what is asked for from `data`."""
    left = memoryview(data)

    def receive(num_bytes: int) -> bytes:
        nonlocal left
        assert num_bytes <= len(left), "more was read than was sent"
        piece, left = bytes(left[:num_bytes]), left[num_bytes:]
        return piece

    return receive


class TwoFolders:
    """A run folder at the agent and its copy at a worker; the link between them breaks where `breaks` says so."""

    def __init__(self, root: Path, breaks: Callable[[], bool] = lambda: False) -> None:
        self.near, self.far, self._record, self._breaks = root / "near", root / "far", root / "record", breaks
        for folder in (self.near, self.far):
            folder.mkdir()
        self.client, self.num_cuts, self.leases = FolderClient(), 0, Leases()
        self.now_s = 2e9
        self.restart_agent()

    def restart_agent(self) -> None:
        """Let another process of the agent serve the folder."""
        self.files = RunFolderFiles(self.near, self._record, clock=lambda: self.now_s)
        self.connect()

    def restart_worker(self) -> None:
        """Let another process of the worker carry on from what the one before had saved."""
        self.client = FolderClient(
            {name: type(one)(one.generation, one.inode, 0) for name, one in self.client.tracked.items()}
        )
        self.connect()

    def connect(self) -> None:
        """Make a new connection."""
        self.server = FolderServer(self.files, lambda: self.leases, {str(self.near): "folder"})
        answer = self.server.handle(HELLO)
        assert answer.kind == "welcome"
        self.client.welcome(answer)

    def ask(self, frame: Frame) -> Frame:
        """Send a frame, which or whose answer may be lost."""
        if self._breaks():
            raise CutError
        answer = self.server.handle(read_frame(reader(pack_frame(frame))))
        if self._breaks():
            raise CutError
        return read_frame(reader(pack_frame(answer)))

    def carry(self, *, ended: bool = False, at_most: int = 10_000) -> None:
        """Carry until the agent has everything, through every cut."""
        for _ in range(at_most):
            carry = self.client.next_carry(self.file_stats(), ended=ended)
            if carry is None:
                return
            before, data, age_s = b"", b"", 0.0
            if carry.kind != "remove":
                before, data, age_s = read_piece(self.far / carry.name, carry)
            if before != carry.tail:
                self.client.rewrite(carry.name)
                continue
            try:
                self.client.handle(carry, data, self.ask(carry.frame(data, age_s)))
            except CutError:
                self.num_cuts += 1
                self.connect()

    def file_stats(self) -> dict[str, FileStat]:
        """Return what is in the worker's folder."""
        found = {file.name: file.stat() for file in self.far.iterdir() if file.is_file()}
        return {name: FileStat(one.st_ino, one.st_size, one.st_mtime_ns) for name, one in found.items()}

    def contents(self, folder: Path) -> dict[str, bytes]:
        """Return the files of a folder but `pid`, which each side has for itself."""
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "pid"}


def test_a_frame_arrives_as_it_was_sent() -> None:
    """Kind, fields and bytes."""
    frame = Frame("put", {"name": "log é", "generation": 3, "age_s": 0.5}, bytes(range(256)))
    assert read_frame(reader(pack_frame(frame))) == frame


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff\x00\x00\x00\x00",
        b"\x00\x00\x00\x00\x00\x00\x00\x00",
        b"\x00\x00\x00\x02\xff\xff\xff\xff",
        b"\x00\x00\x00\x02\x00\x00\x00\x00[]",
        b"\x00\x00\x00\x02\x00\x00\x00\x00{}",
        b"\x00\x00\x00\x02\x00\x00\x00\x00\xff\xfe",
        b"\x00\x00\x00\x0a\x00\x00\x00\x00" + b'{"kind":1}',
        b"\x00\x01\x86\xa0\x00\x00\x00\x00" + b"[" * 100_000,
    ],
)
def test_a_malformed_frame_is_refused_before_its_size_is_read(data: bytes) -> None:
    """Lengths are compared with the bounds first; a head is an object with a kind."""
    with pytest.raises(FrameError):
        read_frame(reader(data))


def test_a_frame_that_is_too_long_is_not_sent() -> None:
    """Neither end makes what the other refuses."""
    with pytest.raises(FrameError, match="too long"):
        pack_frame(Frame("put", {}, bytes(MAX_BODY_BYTES + 1)))


def test_every_file_of_the_worker_reaches_the_agent_and_exit_is_the_last(tmp_path: Path) -> None:
    """New, grown, replaced, touched, shrunk and removed files; `exit` only once the worker has ended."""
    both = TwoFolders(tmp_path)
    (both.far / "log").write_bytes(b"one\n")
    (both.far / "wait.json").write_bytes(b"{}")
    (both.far / "exit").write_bytes(b"0\n")
    both.carry()
    assert both.contents(both.near) == {"log": b"one\n", "wait.json": b"{}"}
    with (both.far / "log").open("ab") as log:
        log.write(b"two\n")
    (both.far / "wait.json").unlink()
    replace_file(both.far / "checkin.json", b'{"port": 1}', 0o644)
    both.carry()
    replace_file(both.far / "checkin.json", b'{"port": 2}', 0o644)
    both.carry(ended=True)
    assert both.contents(both.near) == both.contents(both.far)
    assert both.ask(Frame("done")).kind == "ended"


def test_a_touched_file_is_as_old_at_the_agent_as_at_the_worker(tmp_path: Path) -> None:
    """The time of the last checkpoint is that of the file `saved`, on the clock of the agent."""
    both = TwoFolders(tmp_path)
    (both.far / "saved").touch()
    os.utime(both.far / "saved", (1e9, 1e9))
    both.carry()
    first_s = (both.near / "saved").stat().st_mtime
    os.utime(both.far / "saved", (1e9 + 60, 1e9 + 60))
    both.carry()
    assert (both.near / "saved").stat().st_mtime - first_s == pytest.approx(60, abs=10)


def test_a_file_longer_than_a_frame_grows_in_order(tmp_path: Path) -> None:
    """Its first part is there at once; the rest follows at byte offsets."""
    both = TwoFolders(tmp_path)
    data = random.Random(1).randbytes(3 * MAX_BODY_BYTES + 17)
    (both.far / "log").write_bytes(data)
    both.carry(at_most=2)
    assert (both.near / "log").read_bytes() == data[: 2 * MAX_BODY_BYTES]
    both.restart_agent()
    both.carry()
    assert (both.near / "log").read_bytes() == data


def test_a_file_that_grows_all_the_time_keeps_no_other_back(tmp_path: Path) -> None:
    """What was just carried waits for more of it, unless the worker has ended."""
    both = TwoFolders(tmp_path)
    (both.far / "log").write_bytes(b"one")
    both.carry()
    (both.far / "log").write_bytes(b"one, two")
    (both.far / "metrics.jsonl").write_bytes(b"{}")
    first = both.client.next_carry({"log": both.file_stats()["log"]}, ended=False)
    assert first is not None
    assert first.name == "log"
    second = both.client.next_carry(both.file_stats(), ended=False, later={"log"})
    assert second is not None
    assert second.name == "metrics.jsonl"
    assert both.client.next_carry({"log": both.file_stats()["log"]}, ended=False, later={"log"}) is None
    assert both.client.next_carry({"log": both.file_stats()["log"]}, ended=True, later={"log"}) == first


def test_a_file_that_is_written_again_in_place_is_carried_again(tmp_path: Path) -> None:
    """Bytes that were sent and are no longer there are replaced, also if the file is longer than before."""
    both = TwoFolders(tmp_path)
    (both.far / "cards").write_bytes(b"first text")
    both.carry()
    (both.far / "cards").write_bytes(b"another and longer text")
    both.carry()
    assert (both.near / "cards").read_bytes() == b"another and longer text"


@pytest.mark.parametrize("seed", range(40))
def test_random_cuts_and_restarts_lose_and_double_no_byte(seed: int, tmp_path: Path) -> None:
    """Frames and answers are lost, both ends restart: at any time the agent's log is a beginning of the worker's."""
    rng = random.Random(seed)
    both = TwoFolders(tmp_path, lambda: rng.random() < 0.2)
    written = b""
    for _ in range(60):
        piece = rng.randbytes(rng.choice((1, 100, 70_000)))
        with (both.far / "log").open("ab") as log:
            log.write(piece)
        written += piece
        act = rng.randrange(8)
        if act == 0:
            both.restart_agent()
        elif act == 1:
            both.restart_worker()
        elif act == 2:
            replace_file(both.far / "wait.json", rng.randbytes(20), 0o644)
        elif act == 3:
            (both.far / "wait.json").unlink(missing_ok=True)
        both.carry(at_most=rng.randrange(4))
        if (both.near / "log").exists():
            assert written.startswith((both.near / "log").read_bytes())
    (both.far / "exit").write_bytes(b"0\n")
    both.carry(ended=True)
    assert both.contents(both.near) == both.contents(both.far)
    assert both.num_cuts > 0


def test_the_agents_files_are_listed_and_read_and_never_carried_back(tmp_path: Path) -> None:
    """What appears or changes at the agent is fetched; `pid` stays where it is."""
    both = TwoFolders(tmp_path)
    replace_file(both.near / "spec.json", b"{}", 0o600)
    (both.near / "link").symlink_to("/etc/passwd")
    (both.near / "tmp").mkdir()
    wanted, gone = changed_files(both.ask(Frame("look")), {})
    ((name, stamp, size, mode),) = wanted
    assert (name, size, mode, gone) == ("spec.json", 2, 0o600, [])
    fetch = Frame("fetch", {"name": name, "stamp": stamp, "offset": 0})
    assert both.ask(fetch).body == b"{}"
    (both.far / "spec.json").write_bytes(b"{}")
    both.client.take(name)
    assert both.client.next_carry(both.file_stats(), ended=True) is None
    replace_file(both.near / "spec.json", b"[1]", 0o600)
    assert both.ask(fetch).kind == "changed"
    assert changed_files(both.ask(Frame("look")), {name: stamp, "old": "x"})[1] == ["old"]


def test_the_worker_of_a_folder_is_one_and_a_stopped_one_never_starts(tmp_path: Path) -> None:
    """The first instance takes the folder; another is refused, and so is the first after a stop before its start."""
    both = TwoFolders(tmp_path)
    other = Frame("hello", {"version": VERSION, "instance": "cd" * 32, "host": "node-2"})
    server = FolderServer(both.files, lambda: both.leases, {})
    assert server.handle(other).kind == "refused"
    assert FolderServer(both.files, lambda: both.leases, {}).handle(HELLO).kind == "welcome"
    with pytest.raises(FrameError, match="before 'hello'"):
        server.handle(Frame("look"))


def test_paths_of_the_folder_become_those_of_its_copy() -> None:
    """In JSON, at any depth; a path that only begins alike stays."""
    given = {"run_lease": "/a/lease/lease.json", "argv": ["run", "/a/f", "/a/f/x", "/a/folder"], "n": 1}
    paths = {"/a/f": "/w/folder", "/a/lease": "/w/lease"}
    expected = {"run_lease": "/w/lease/lease.json", "argv": ["run", "/w/folder", "/w/folder/x", "/a/folder"], "n": 1}
    assert replace_paths(given, paths) == expected
