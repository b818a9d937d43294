"""Attacks on the courier's listener and folders: by strangers, by holders of other tickets, and by a worker itself."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent.courier.courier import Courier
from isthmus.agent.courier.courier_frames import MAX_FILES, VERSION, Frame, FrameError
from isthmus.agent.courier.courier_link import CourierLink
from isthmus.agent.courier.courier_listener import MAX_STRANGERS
from isthmus.agent.courier.folder_server import FolderServer, Leases
from isthmus.agent.courier.run_folder_files import FileDeniedError, RunFolderFiles

pytestmark = pytest.mark.attack

INSTANCE, OTHER = "ab" * 32, "cd" * 32
BROKEN = (OSError, FrameError, struct.error)


@pytest.fixture
def courier(tmp_path: Path) -> Iterator[Courier]:
    """An agent's courier with two run folders, `a` and `b`."""
    for name in "ab":
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "spec.json").write_text(f'"secret of {name}"')
    made = Courier(tmp_path / "state")
    yield made
    made.close()


def ticket(courier: Courier, folder: Path) -> dict[str, Any]:
    return json.loads(courier.ticket(folder))


def hello(instance: str = INSTANCE) -> Frame:
    return Frame("hello", {"version": VERSION, "instance": instance, "host": "h"})


def files_in(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*") if one.is_file()}


def answers_of(port: int, sent: bytes, timeout_s: float = 15.0) -> bytes:
    """Send bytes to a port and return all that comes back until the connection ends."""
    found = b""
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as raw:
        raw.sendall(sent)
        while data := raw.recv(65536):
            found += data
    return found


def test_a_stranger_gets_nothing_without_tls_and_a_token(courier: Courier, tmp_path: Path) -> None:
    """Bytes in the clear, and a TLS connection with a guessed token, end without a frame and change no file."""
    found = ticket(courier, tmp_path / "runs/a")
    before = files_in(tmp_path / "runs")
    assert b"secret" not in answers_of(found["port"], b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    for token in ("00" * 32, found["token"][:-2] + ("00" if found["token"][-2:] != "00" else "11")):
        link = CourierLink(found | {"token": token})
        with pytest.raises(BROKEN):
            link.ask(hello())
        link.close()
    assert files_in(tmp_path / "runs") == before


def test_a_host_that_poses_as_the_agent_is_not_given_the_token(courier: Courier, tmp_path: Path) -> None:
    """The certificate is pinned: with another key the worker ends before it sends its token."""
    other = Courier(tmp_path / "other")
    (tmp_path / "elsewhere").mkdir()
    poser = ticket(other, tmp_path / "elsewhere")
    with pytest.raises(ssl.SSLError):
        CourierLink(ticket(courier, tmp_path / "runs/a") | {"port": poser["port"]})
    other.close()


def test_older_tls_is_refused(courier: Courier, tmp_path: Path) -> None:
    """TLS 1.3 alone."""
    found = ticket(courier, tmp_path / "runs/a")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", found["port"]), timeout=10) as raw, pytest.raises(BROKEN):
        tls.wrap_socket(raw)


def test_a_token_opens_its_own_folder_alone(courier: Courier, tmp_path: Path) -> None:
    """What the worker of `a` lists, reads and writes is in `a`, whatever names it uses."""
    link = CourierLink(ticket(courier, tmp_path / "runs/a"))
    before = files_in(tmp_path / "runs/b")
    assert link.ask(hello()).kind == "welcome"
    listing = link.ask(Frame("look"))
    assert list(listing.mapping("files")) == ["spec.json"]
    link.close()
    for name in ("../b/spec.json", "..", "/etc/passwd", "tmp/x", ".hidden", "a\0b", "x\n", "", "é" * 101):
        for kind in ("put", "append", "remove", "fetch"):
            one = CourierLink(ticket(courier, tmp_path / "runs/a"))
            assert one.ask(hello()).kind == "welcome"
            fields = {"name": name, "generation": 1, "offset": 0, "age_s": 0.0, "stamp": "x"}
            with pytest.raises(BROKEN):
                one.ask(Frame(kind, fields, b"x"))
            one.close()
    assert files_in(tmp_path / "runs/b") == before


def test_a_forged_or_revoked_token_opens_nothing(courier: Courier, tmp_path: Path) -> None:
    """A revoked ticket ends its connection at once, and a new ticket of the folder is another."""
    folder = tmp_path / "runs/a"
    first = ticket(courier, folder)
    assert first == ticket(courier, folder)
    link = CourierLink(first)
    assert link.ask(hello()).kind == "welcome"
    courier.revoke(folder)
    with pytest.raises(BROKEN):
        link.ask(Frame("look"))
    again = CourierLink(first)
    with pytest.raises(BROKEN):
        again.ask(hello())
    assert ticket(courier, folder)["token"] != first["token"]
    for one in (link, again):
        one.close()


def test_a_ticket_that_is_read_later_opens_nothing(courier: Courier, tmp_path: Path) -> None:
    """The first worker brings a secret of its own: the ticket without it is refused, also after a restart."""
    found = ticket(courier, tmp_path / "runs/a")
    first = CourierLink(found)
    assert first.ask(hello()).kind == "welcome"
    assert INSTANCE not in json.dumps(found)
    thief = CourierLink(found)
    assert thief.ask(hello(OTHER)).kind == "refused"
    with pytest.raises(BROKEN):
        thief.ask(Frame("look"))
    assert first.ask(Frame("look")).kind == "listing"
    courier.close()
    second = Courier(tmp_path / "state")
    late = CourierLink(found)
    assert late.ask(hello(OTHER)).kind == "refused"
    for one in (first, thief, late):
        one.close()
    second.close()


def test_a_replayed_connection_changes_nothing(courier: Courier, tmp_path: Path) -> None:
    """Frames of an earlier connection, sent again, neither double nor cut what is on the disk."""
    found = ticket(courier, tmp_path / "runs/a")
    put = Frame("put", {"name": "log", "generation": 1, "age_s": 0.0}, b"one\n")
    append = Frame("append", {"name": "log", "generation": 1, "offset": 4, "age_s": 0.0}, b"two\n")
    link = CourierLink(found)
    for frame in (hello(), put, append, append, append):
        answer = link.ask(frame)
    assert answer.fields == {"generation": 1, "size": 8}
    later = CourierLink(found)
    assert later.ask(hello()).mapping("have") == {"log": [1, 8]}
    with pytest.raises(BROKEN):  # the earlier connection is over: what it still sends is void
        link.ask(put)
    assert later.ask(append).fields == {"generation": 1, "size": 8}
    assert (tmp_path / "runs/a/log").read_text() == "one\ntwo\n"
    for one in (link, later):
        one.close()


def test_a_recorded_connection_sent_again_opens_nothing(courier: Courier, tmp_path: Path) -> None:
    """TLS keys are new in each connection: recorded bytes are noise."""
    found = ticket(courier, tmp_path / "runs/a")
    recorded = b""
    if True:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        stream = tls.wrap_bio(incoming, outgoing)
        with socket.create_connection(("127.0.0.1", found["port"]), timeout=10) as raw:
            while True:
                try:
                    stream.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    data = outgoing.read()
                    recorded += data
                    raw.sendall(data)
                    incoming.write(raw.recv(65536))
            stream.write(bytes.fromhex(found["token"]))
            data = outgoing.read()
            recorded += data
            raw.sendall(data)
    assert b"secret" not in answers_of(found["port"], recorded)
    assert not (tmp_path / "runs/a/pid").exists()


def test_a_worker_does_not_write_the_files_of_the_agent(tmp_path: Path) -> None:
    """Its orders, its own claim and a file that the agent has put there: each is denied and stays as it is."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "go").write_text("agent's")
    server = server_of(folder, tmp_path)
    for name in ("pid", "stop", "spec.json", "limits.json", "ranks.json", "start.json", "keys.json", "hold", "go"):
        put = Frame("put", {"name": name, "generation": 1, "age_s": 0.0}, b"mine")
        append = Frame("append", {"name": name, "generation": 0, "offset": 0, "age_s": 0.0}, b"mine")
        assert [server.handle(one).kind for one in (put, append)] == ["denied", "denied"]
    assert server.handle(Frame("remove", {"name": "go"})).kind == "denied"
    assert sorted(files_in(folder)) == ["go", "pid"]
    assert (folder / "go").read_text() == "agent's"


def test_links_in_a_folder_lead_nowhere(tmp_path: Path) -> None:
    """A link in place of a file is neither listed, read nor written through; a folder that is a link is gone."""
    folder, secret = tmp_path / "run", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    server = server_of(folder, tmp_path)
    server.handle(Frame("put", {"name": "log", "generation": 1, "age_s": 0.0}, b""))
    (folder / "log").unlink()
    (folder / "log").symlink_to(secret)
    (folder / "in").symlink_to(secret)
    assert server.handle(Frame("look")).mapping("files") == {}
    assert server.handle(Frame("fetch", {"name": "in", "stamp": "x", "offset": 0})).kind == "changed"
    with suppress(*BROKEN):
        server.handle(Frame("append", {"name": "log", "generation": 1, "offset": 6, "age_s": 0.0}, b"more"))
    server.handle(Frame("put", {"name": "log", "generation": 2, "age_s": 0.0}, b"own"))
    assert (secret.read_text(), (folder / "log").read_text()) == ("secret", "own")


def test_a_worker_fills_the_disk_no_further_than_its_bound(tmp_path: Path) -> None:
    """Bytes in all and the number of files are bounded; what is beyond is denied."""
    folder = tmp_path / "run"
    folder.mkdir()
    files = RunFolderFiles(folder, tmp_path / "record", max_bytes=100)
    files.put("log", 1, bytes(60), 0.0)
    with pytest.raises(FileDeniedError, match="bytes in a run folder"):
        files.append("log", 1, 60, bytes(41), 0.0)
    files.append("log", 1, 60, bytes(40), 0.0)
    (tmp_path / "record").write_text(json.dumps({str(number): 1 for number in range(MAX_FILES)}))
    with pytest.raises(FileDeniedError, match="files"):
        RunFolderFiles(folder, tmp_path / "record").put("new", 1, b"", 0.0)


@pytest.mark.parametrize(
    "frame",
    [
        Frame("put", {"name": "log", "generation": -1, "age_s": 0.0}),
        Frame("put", {"name": "log", "generation": 2**80, "age_s": 0.0}),
        Frame("put", {"name": "log", "generation": 1, "age_s": float("nan")}),
        Frame("put", {"name": "log", "generation": True, "age_s": 0.0}),
        Frame("put", {"name": ["log"], "generation": 1, "age_s": 0.0}),
        Frame("append", {"name": "log", "generation": 1, "offset": "0", "age_s": 0.0}),
        Frame("hello", {"version": VERSION, "instance": "x", "host": "h"}),
        Frame("hello", {"version": VERSION, "instance": INSTANCE, "host": "h\n"}),
        Frame("done"),
        Frame("shutdown"),
    ],
)
def test_fields_that_lie_end_the_connection(frame: Frame, tmp_path: Path) -> None:
    """Numbers, names and kinds are checked before a file is opened."""
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(FrameError):
        server_of(folder, tmp_path).handle(frame)
    assert list(files_in(folder)) == ["pid"]


def test_an_oversize_announcement_ends_the_connection(courier: Courier, tmp_path: Path) -> None:
    """Lengths beyond the bounds, by a worker with a valid ticket: the connection ends before the bytes are sent."""
    found = ticket(courier, tmp_path / "runs/a")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.load_verify_locations(cadata=found["certificate"])
    for lengths in ((2**32 - 1, 0), (2, 2**32 - 1), (0, 0)):
        with tls.wrap_socket(socket.create_connection(("127.0.0.1", found["port"]), timeout=10)) as stream:
            stream.sendall(bytes.fromhex(found["token"]) + struct.pack("!II", *lengths))
            with suppress(ConnectionError):
                assert stream.recv(1) == b""


def test_silent_and_slow_strangers_keep_no_worker_out(courier: Courier, tmp_path: Path) -> None:
    """More silent connections than are kept: the oldest make room, and a worker is served at once."""
    found = ticket(courier, tmp_path / "runs/a")
    silent = [socket.create_connection(("127.0.0.1", found["port"])) for _ in range(MAX_STRANGERS + 20)]
    link = CourierLink(found)
    assert link.ask(hello()).kind == "welcome"
    silent[0].settimeout(5.0)
    with suppress(ConnectionError):
        assert silent[0].recv(1) == b""  # cut in the middle of its handshake, long before its time is up
    assert sum(one.name == "courier" for one in threading.enumerate()) <= MAX_STRANGERS + 1
    link.close()
    for one in silent:
        one.close()


@pytest.mark.slow
def test_a_stranger_that_drips_is_cut(tmp_path: Path) -> None:
    """The time for a proof does not move with each byte: a caller that goes on sending is cut all the same."""
    state = Courier(tmp_path / "state")
    (tmp_path / "run").mkdir()
    found = ticket(state, tmp_path / "run")
    with socket.create_connection(("127.0.0.1", found["port"]), timeout=1.0) as raw:
        ended = False
        for byte in b"\x16\x03\x01\x02\x00\x01" + bytes(40):
            with suppress(TimeoutError):
                try:
                    raw.sendall(bytes([byte]))
                    ended = raw.recv(1) == b""
                except ConnectionError:
                    ended = True
            if ended:
                break
    assert ended
    state.close()


def test_a_listener_closes_every_connection(tmp_path: Path, courier: Courier) -> None:
    """Nothing is served after `close`, and no thread is left behind."""
    found = ticket(courier, tmp_path / "runs/a")
    link = CourierLink(found)
    assert link.ask(hello()).kind == "welcome"
    courier.close()
    with pytest.raises(BROKEN):
        link.ask(Frame("look"))
    link.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", found["port"]), timeout=5)


def server_of(folder: Path, root: Path) -> FolderServer:
    """Return the agent's end of a welcomed worker of `folder`."""
    server = FolderServer(RunFolderFiles(folder, root / "record"), Leases, {})
    assert server.handle(hello()).kind == "welcome"
    return server
