"""Links between ranks with keys: what they cost beside none and beside `ssl`, and what forged greetings reach.

All sides run in this process in turn, over sockets on loopback, so CPU seconds are those of both ends. Steps of a real
pipeline are measured by `_trust_steps`.
"""

from __future__ import annotations

import datetime
import resource
import secrets
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.table import Row, compared
from isthmus.comm.channel.link_keys import LinkKeys
from isthmus.comm.connect_transport import connect_transport
from isthmus.comm.tcp.endpoint import Endpoint
from isthmus.comm.tcp.greeting import Greeting, send_json_line
from isthmus.comm.tcp.sealed_greeting import SealedHandshake
from isthmus.comm.tcp.wire_format import DATA, FrameHeader, pack_header
from isthmus.comm.transport.transport import JoinedTransport
from isthmus.control.server.tls import self_signed_certificate
from isthmus.wan import listen

SITES = ("a", "b")
MESSAGE_BYTES, PART_BYTES = 4 * 2**20, 256 * 2**10
STEP_MESSAGES, STEP_BYTES, COMPUTE_S = 8, 2**20, 0.01
PAUSE_S = 0.01
"""Between two attacks."""
LIMIT_S = 60.0


def measure(quick: bool) -> list[Row]:
    """Return CPU s per GB with keys, without, and through `ssl`; step times; and what forged greetings reach."""
    num_messages, rounds = (64, 3) if quick else (256, 5)
    plain, sealed, tls = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        plain.append(_cpu_s_per_gb(None, num_messages))
        sealed.append(_cpu_s_per_gb(_new_keys(), num_messages))
        tls.append(_tls_cpu_s_per_gb(num_messages) - _socket_cpu_s_per_gb(num_messages))
    more = statistics.median(one - other for one, other in zip(sealed, plain, strict=True))
    what = f"keys on links, both ends: CPU s per GB more (without {statistics.median(plain):.2f})"
    rows = [compared(what, more, "s", "`ssl` over a socket", statistics.median(tls), target="≤ 0.3", met=more <= 0.3)]
    return [*rows, *_steps(30 if quick else 100), *_forged(1000 if quick else 10_000)]


def _new_keys() -> list[LinkKeys]:
    keys = {pair: secrets.token_bytes(32) for pair in ("aa", "ab", "bb")}
    own = {one: {other: keys["".join(sorted(one + other))] for other in SITES} for one in SITES}
    return [LinkKeys(site, SITES, own[site]) for site in SITES]


@contextmanager
def _pair(keys: list[LinkKeys] | None) -> Iterator[tuple[list[JoinedTransport], tuple[str, int]]]:
    """Two joined ranks with four connections, and where rank 0 listens."""
    listeners = [listen("127.0.0.1") for _ in SITES]
    endpoints = [Endpoint("127.0.0.1", one.getsockname()[1], None, 4) for one in listeners]

    def join(rank: int) -> JoinedTransport:
        own = keys and keys[rank]
        return connect_transport("thread", Greeting("r", 1, rank, 2), endpoints, listeners[rank], LIMIT_S, keys=own)

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(join, range(2)))
        try:
            yield ranks, listeners[0].getsockname()
        finally:
            list(pool.map(lambda one: one.close(), ranks))
            for one in listeners:
                one.close()


def _exchange(ranks: list[JoinedTransport], tag: int, data: memoryview, into: memoryview) -> None:
    received = ranks[1].receive(0, tag, "x", into)
    ranks[0].send(1, tag, "x", data).result(LIMIT_S)
    received.result(LIMIT_S)


def _cpu_s_per_gb(keys: list[LinkKeys] | None, count: int) -> float:
    data, into = memoryview(secrets.token_bytes(MESSAGE_BYTES)), memoryview(bytearray(MESSAGE_BYTES))
    with _pair(keys) as (ranks, _):
        _exchange(ranks, 0, data, into)
        begun_s = time.process_time()
        for _ in range(count):
            _exchange(ranks, 0, data, into)
        return (time.process_time() - begun_s) / (count * MESSAGE_BYTES / 1e9)


def _socket_cpu_s_per_gb(count: int) -> float:
    near, far = socket.socketpair()
    with near, far:
        return _stream(near, far, count)


def _tls_cpu_s_per_gb(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        made = self_signed_certificate(Path(folder), ("localhost",), datetime.datetime.now(datetime.UTC))
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(made.trust))
        server.load_cert_chain(made.cert, made.key)
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(server.wrap_socket, far, server_side=True)
        with client.wrap_socket(near, server_hostname="localhost") as one, accepted.result(LIMIT_S) as other:
            return _stream(one, other, count)


def _stream(near: socket.socket, far: socket.socket, count: int) -> float:
    """Return the CPU s per GB of sending pieces of `PART_BYTES` from one socket to the other."""
    data, into = secrets.token_bytes(PART_BYTES), memoryview(bytearray(PART_BYTES))
    num_bytes = count * MESSAGE_BYTES

    def receive() -> None:
        left = num_bytes
        while left:
            left -= far.recv_into(into)

    begun_s = time.process_time()
    reader = threading.Thread(target=receive)
    reader.start()
    for _ in range(num_bytes // PART_BYTES):
        near.sendall(data)
    reader.join()
    return (time.process_time() - begun_s) / (num_bytes / 1e9)


def _step_s(ranks: list[JoinedTransport], data: memoryview, into: memoryview) -> float:
    """Return the seconds of one step: micro-batches that wait 10 ms for a chip, then cross the link."""
    begun_s = time.perf_counter()
    for tag in range(STEP_MESSAGES):
        time.sleep(COMPUTE_S)
        _exchange(ranks, tag, data, into)
    return time.perf_counter() - begun_s


def _steps(count: int) -> list[Row]:
    data, into = memoryview(secrets.token_bytes(STEP_BYTES)), memoryview(bytearray(STEP_BYTES))
    with _pair(None) as (plain, _), _pair(_new_keys()) as (sealed, _):
        ratios = [_step_s(sealed, data, into) / _step_s(plain, data, into) for _ in range(count)]
    quarters = statistics.quantiles(ratios, n=4)
    more = 100 * (statistics.median(ratios) - 1)
    spread = f"half of {count} pairs within {quarters[0]:.3f} to {quarters[2]:.3f}"
    what = (
        f"{STEP_MESSAGES} messages of 1 MiB at full speed between threads of one process with keys, {spread}: longer by"
    )
    return [Row(what=what, ours=more, unit="%")]


def _forged(count: int) -> list[Row]:
    """Return what `count` greetings and heads of strangers do to a run: taken, memory, and the time of steps."""
    data, into = memoryview(secrets.token_bytes(STEP_BYTES)), memoryview(bytearray(STEP_BYTES))
    answered, attacking = list[int](), threading.Event()
    with _pair(_new_keys()) as (ranks, address):
        _step_s(ranks, data, into)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attacker = threading.Thread(target=_attack, args=(address, count, answered, attacking))
        attacker.start()
        ratios = []
        while attacker.is_alive():
            quiet_s = _step_s(ranks, data, into)
            attacking.set()
            ratios.append(_step_s(ranks, data, into) / quiet_s)
            attacking.clear()
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
        lost = [one.loss() for one in ranks]
        same = bytes(into) == bytes(data)
    taken = len(answered) + sum(one is not None for one in lost) + (not same)
    longer, quarters = 100 * (statistics.median(ratios) - 1), statistics.quantiles(ratios, n=4)
    spread = f"half of {len(ratios)} pairs within {quarters[0]:.3f} to {quarters[2]:.3f}"
    what = f"{count:,} forged greetings, heads and incarnations"
    return [
        Row(what=f"{what}: answered, lost ranks or changed messages", ours=taken, unit="", target="0", met=taken == 0),
        Row(what=f"{what}: memory", ours=grown_mib, unit="MiB", target="≤ 64", met=grown_mib <= 64),
        Row(
            what=f"{what}, at most 100 a second, {spread}: step longer by",
            ours=longer,
            unit="%",
            target="≤ 2",
            met=longer <= 2,
        ),
    ]


def _attack(address: tuple[str, int], count: int, answered: list[int], attacking: threading.Event) -> None:
    """While `attacking`, greet rank 0 as a stranger who knows everything but the key; record what is answered."""
    wrong = _new_keys()[1]
    giant = pack_header(FrameHeader(DATA, label="x", message_bytes=3 * 2**30, payload_bytes=3 * 2**30))
    for number in range(count):
        attacking.wait(LIMIT_S)
        greeting = Greeting("r", 1, 1, 2, number // 3 % 5)
        with suppress(OSError), socket.create_connection(address, LIMIT_S) as caller:
            if number % 3 == 0:
                send_json_line(caller, greeting.as_dict() | {"lane": number % 4})
            elif number % 3 == 1:
                caller.sendall(giant * 2)
            else:
                SealedHandshake(greeting, wrong, time.time).dial(caller, 0, number % 4)
            if number % 3 == 2 or caller.recv(1):
                answered.append(number)
        time.sleep(PAUSE_S)
