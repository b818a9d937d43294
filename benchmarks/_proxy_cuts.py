"""Half an hour of cuts of the legs between two proxies: what crosses, how long it pauses, and the memory it takes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from benchmarks.table import Row, compared
from isthmus.wan.dial import dial
from tests.wan.tunnel.tunnel_lab import TunnelLab

DURATION_S = 1800.0
QUICK_S = 60.0
BLOCK_BYTES = 32_768
BLOCKS_PER_S = 32
AWAY_S = 10.0
"""Longest time for which no leg can be dialled, or none passes a byte."""

SILENT_S = 60.0
"""A connection that brings nothing for so long counts as broken: a tunnel without legs ends by then."""

END_S = 120.0
"""Longest time that a run takes beyond its duration."""

MOST_KEPT_BYTES = 16 * 2**20
"""Most that one side of the tunnel may keep in these runs."""

HOME = ("127.0.0.1", 0)


class Scissors:
    """A relay between two proxies that breaks, stops and refuses legs by seed; it runs on a loop in a thread."""

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self.num_cuts, self.num_legs_cut, self.cut_s = 0, 0, 0.0
        self._target, self._rng = target, Random(seed)
        self._legs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._is_open, self._passes = True, asyncio.Event()
        self._passes.set()

    async def serve(self, started: threading.Event, stop: threading.Event) -> None:
        """Relay and cut until `stop`."""
        server = await asyncio.start_server(self._relay, *HOME)
        self.address = server.sockets[0].getsockname()
        cuts = asyncio.create_task(self._cut_by_seed())
        started.set()
        while not stop.is_set():
            await asyncio.sleep(0.1)
        cuts.cancel()
        self._break(len(self._legs))
        server.close()

    async def _cut_by_seed(self) -> None:
        rng = self._rng
        while True:
            await asyncio.sleep(rng.uniform(2, 8))
            self.num_cuts += 1
            kind = rng.choices(("one", "all", "away", "silent"), (4, 2, 1, 1))[0]
            wait_s = rng.uniform(1, AWAY_S) if kind in ("away", "silent") else 0.0
            if kind == "silent":
                self._passes.clear()
            else:
                self._break(1 if kind == "one" else len(self._legs))
                self._is_open = kind != "away"
            await asyncio.sleep(wait_s)
            self.cut_s += wait_s
            if kind == "silent":  # what waits here is lost
                self._break(len(self._legs))
            self._is_open = True
            self._passes.set()

    def _break(self, count: int) -> None:
        for leg in self._rng.sample(self._legs, min(count, len(self._legs))):
            self.num_legs_cut += 1
            for side in leg:
                side.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_open:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        leg = writer, far_writer
        self._legs.append(leg)
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        except (OSError, EOFError):
            pass
        finally:
            self._legs.remove(leg)
            for side in leg:
                side.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        raise EOFError


class Courier:
    """A connection through the proxies to an echo: seeded bytes at a steady rate, each compared as it comes back."""

    def __init__(self, connection: socket.socket, duration_s: float, silent_s: float = SILENT_S) -> None:
        self._connection, self._duration_s = connection, duration_s
        connection.settimeout(silent_s)
        self.num_bytes = self.num_sent = 0
        self.is_whole, self.longest_pause_s = True, 0.0

    def run(self) -> None:
        """Send for the duration, and read until the echo's end; what breaks or falls silent is not whole."""
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        try:
            self._read()
        except OSError:
            self.is_whole = False
        sender.join(END_S)
        self.is_whole &= not sender.is_alive()
        self._connection.close()

    def _read(self) -> None:
        expected, rest, heard_s = Random(1), b"", time.monotonic()
        while data := self._connection.recv(65_536):
            now_s = time.monotonic()
            self.longest_pause_s, heard_s = max(self.longest_pause_s, now_s - heard_s), now_s
            while len(rest) < len(data):
                rest += expected.randbytes(BLOCK_BYTES)
            self.is_whole &= rest[: len(data)] == data
            rest = rest[len(data) :]
            self.num_bytes += len(data)

    def _send(self) -> None:
        content, start_s, number = Random(1), time.monotonic(), 0
        try:
            while time.monotonic() - start_s < self._duration_s:
                self._connection.sendall(content.randbytes(BLOCK_BYTES))
                number += 1
                self.num_sent = number * BLOCK_BYTES
                time.sleep(max(0.0, start_s + number / BLOCKS_PER_S - time.monotonic()))
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            self.is_whole = False


@contextmanager
def _proxy(site: str, state: Path, *options: str) -> Iterator[int]:
    """Run `isthmus proxy`; yield its process id once it listens."""
    command = [sys.executable, "-m", "isthmus", "proxy", "--json", "--site", site, "--state", str(state / site)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (state / site / "routes.json").exists():
            if process.poll() is not None:
                raise RuntimeError(f"the proxy of {site} has ended with status {process.returncode}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(SILENT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(65_536):
            connection.sendall(data)


def _peak_mib(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _free_port() -> int:
    with socket.create_server(HOME) as one:
        port: int = one.getsockname()[1]
        return port


def _loopback_rows(duration_s: float) -> Iterator[Row]:
    """Two `isthmus proxy` processes and their legs through `Scissors`."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = state / "link.key"
        key.write_text(os.urandom(32).hex())
        key.chmod(0o600)
        there = ("127.0.0.1", _free_port())
        listener = stack.enter_context(socket.create_server(HOME))
        scissors, started, stop = Scissors(there, seed=20), threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(scissors.serve(started, stop)), daemon=True)
        thread.start()
        stack.callback(thread.join, END_S)
        stack.callback(stop.set)
        if not started.wait(END_S):
            raise RuntimeError(f"the relay between the proxies has not started in {END_S:g} s")
        far = ("--key", f"a={key}", "--listen", f"{there[0]}:{there[1]}")
        near = ("--key", f"b={key}", "--peer", f"b={scissors.address[0]}:{scissors.address[1]}", "--legs", "3")
        pids = [stack.enter_context(_proxy("b", state, *far)), stack.enter_context(_proxy("a", state, *near))]
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        route = json.loads((state / "a" / "routes.json").read_text())["a"]["b"]
        courier = Courier(dial(listener.getsockname(), route), duration_s)
        worker = threading.Thread(target=courier.run, daemon=True)
        worker.start()
        worker.join(duration_s / 3)
        early_mib = sum(map(_peak_mib, pids))
        worker.join(2 * duration_s / 3 + END_S)
        has_ended = not worker.is_alive()
        peak_mib = sum(map(_peak_mib, pids))
    minutes, moved_mb = duration_s / 60, courier.num_bytes / 1e6
    cut = f"{scissors.num_cuts} cuts ({scissors.num_legs_cut} legs, {scissors.cut_s:.0f} s without any)"
    wrong = abs(courier.num_sent - courier.num_bytes) + (not courier.is_whole) + (not has_ended)
    yield Row(
        what=f"{minutes:.0f} minutes of cuts: {cut}, {moved_mb:.0f} MB there and back: bytes lost, repeated or moved",
        ours=wrong, unit="bytes", target="0", met=not wrong and bool(scissors.num_cuts),
    )  # fmt: skip
    yield Row(what="longest pause of the connection", ours=courier.longest_pause_s, unit="s")
    yield compared(
        "memory of both proxies, peak", peak_mib, "MiB", "peak of the first third", early_mib, target="1.1 x",
        met=peak_mib <= 1.1 * early_mib,
    )  # fmt: skip


def _virtual_rows(duration_s: float) -> Iterator[Row]:
    """Two engines on a virtual clock: a stream each way a second, a cut every few seconds, repeats and reordering."""
    lab, rng = TunnelLab(20, repeat_probability=0.01, reorder=True), Random(20)
    opened: dict[int, tuple[bytes, bytes]] = {}
    num_whole, num_bytes, next_cut_s, back_s = 0, 0, 2.0, 0.0
    for second in range(int(duration_s)):
        sent = rng.randbytes(rng.randrange(400_000)), rng.randbytes(rng.randrange(400_000))
        opened[lab.open(*sent)] = sent
        num_bytes += sum(map(len, sent))
        if second >= next_cut_s:
            next_cut_s = second + rng.uniform(2, 8)
            lab.cut_all() if rng.random() < 0.5 else lab.cut(max(lab.legs, default=0))
            if rng.random() < 0.25:
                lab.can_dial, back_s = False, second + rng.uniform(1, AWAY_S)
        lab.can_dial |= second >= back_s
        lab.run(second + 1)
        lab.now_s = max(lab.now_s, second + 1)
        num_whole += _take_whole(lab, opened)
    lab.can_dial = True
    lab.run(duration_s + 100)
    num_whole += _take_whole(lab, opened)
    wrong = int(duration_s) - num_whole
    yield Row(
        what=f"{duration_s / 60:.0f} minutes of cuts on a virtual clock: {lab.num_cuts} legs, {int(duration_s):,} "
        f"connections, {num_bytes / 1e6:.0f} MB: connections that are not whole",
        ours=wrong, unit="", target="0", met=not wrong and bool(lab.num_cuts),
    )  # fmt: skip
    most, bound = max(lab.max_held_bytes) / 2**20, MOST_KEPT_BYTES / 2**20
    what = "bytes that one side kept, peak"
    yield Row(what=what, ours=most, unit="MiB", target=f"{bound:.0f}", met=most <= bound)


def _take_whole(lab: TunnelLab, opened: dict[int, tuple[bytes, bytes]]) -> int:
    """Forget the connections that have ended with every byte in order, at both ends; return how many."""
    whole = []
    for stream, (data, reply) in opened.items():
        near, far = (side.get(stream) for side in lab.workers)
        if near and far and near.ended and far.ended and near.got == reply and far.got == data:
            whole.append(stream)
    for stream in whole:
        del opened[stream], lab.workers[0][stream], lab.workers[1][stream]
    return len(whole)


def cut_rows(quick: bool) -> list[Row]:
    """Every byte once and in order, and what it takes."""
    duration_s = QUICK_S if quick else DURATION_S
    return [*_virtual_rows(duration_s), *_loopback_rows(duration_s)]
