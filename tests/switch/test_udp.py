"""Rules of the UDP shells: real sockets on loopback, in batches and one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from isthmus.core.errors import FileError, UnavailableError
from isthmus.core.messages.datagram import Datagram
from isthmus.core.messages.switch_keys import job_switch_key
from isthmus.switch import (
    ClientState,
    DerivedJobKeys,
    FixedPoint,
    SlotPool,
    Start,
    StreamSettings,
    SwitchClient,
    job_number,
    magnitude_bits,
    read_job_keys,
    run_client,
)
from isthmus.wan import UdpSocket
from tests.switch.served import served

KEY = b"k" * 32
JOB = job_number("job")


def sum_over(address: tuple[str, int], num: int, size: int, key: bytes, *, batches: bool) -> list[SwitchClient]:
    """Run one sum of `size` values of ones at each of `num` workers, in threads."""

    def work(worker: int) -> SwitchClient:
        client = SwitchClient(StreamSettings(job=JOB, run=1, stream=0, worker=worker, workers=num, key=key))
        parts = np.full((-(-size // 256), 256), worker + 1, np.float32)
        with closing(UdpSocket(batches=batches)) as udp:
            run_client(client, Start(parts, magnitude_bits(parts)), udp, address, time.monotonic, timeout_s=120)
        return client

    with ThreadPoolExecutor(num) as threads:
        return list(threads.map(work, range(num)))


@pytest.mark.slow
@pytest.mark.parametrize("batches", [True, False])
def test_a_sum_over_real_sockets(batches):
    """Three workers sum a million values over UDP, in batches of a system call or one packet each."""
    pool = SlotPool(64, 256, keys={JOB: KEY}, incarnation=1, secret=b"s")
    with served(pool, batches=batches) as address:
        clients = sum_over(address, 3, 1_000_000, KEY, batches=batches)
    point = FixedPoint(3)
    for client in clients:
        assert client.state is ClientState.DONE, client.failure
        values = point.to_values(client.sums, point.scales(client.sum_bits))
        np.testing.assert_allclose(values, 6.0, atol=point.error_bound(3.0))
    assert pool.statistics()["rejected"] == {}
    pool.check()


def test_packets_of_a_batch_are_told_apart():
    """What is sent as one datagram of several packets is received with their size, or packet by packet."""
    data = b"".join(bytes([place]) * 100 for place in range(5)) + b"x" * 20
    for batches in (True, False):
        with closing(UdpSocket(batches=batches)) as near, closing(UdpSocket(batches=True)) as far:
            near.send(Datagram(far.address, data, 100))
            got = list(far.receive())
            assert b"".join(one.data for one in got) == data
            assert {one.packet_bytes for one in got[:-1]} <= {100}
            assert all(one.address == near.address for one in got)


def test_an_address_in_use_is_named():
    """A port that is taken, and a host that is not of this machine."""
    with closing(UdpSocket()) as udp, pytest.raises(UnavailableError, match=f":{udp.address[1]}: Address already in"):
        UdpSocket(port=udp.address[1])
    with pytest.raises(UnavailableError, match=r"cannot listen at 192\.0\.2\.1"):
        UdpSocket("192.0.2.1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("job", "1: is not a job's name and a key"),
        ("# keys\njob 00ff", "2: is not a job's name and a key"),
        ("job " + "zz" * 32, "1: is not a job's name and a key"),
        ("job " + "00" * 32 + "\njob " + "11" * 32, "2: a second key of job job"),
    ],
)
def test_bad_key_files_are_named_without_their_keys(tmp_path, text, message):
    """File, line and reason; never what the line has."""
    file = tmp_path / "switch.keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(FileError, match=message) as raised:
        read_job_keys(file)
    assert "zz" not in str(raised.value)
    assert "00ff" not in str(raised.value)


def test_key_files_of_others_are_refused(tmp_path):
    """A file that other accounts may read holds no secret."""
    file = tmp_path / "switch.keys"
    file.write_text("job " + KEY.hex())
    file.chmod(0o640)
    with pytest.raises(FileError, match="other accounts may read"):
        read_job_keys(file)
    file.chmod(0o600)
    assert read_job_keys(file) == {JOB: KEY}


def test_keys_of_a_pool_are_derived_and_named_ones_count_first():
    """Any job has one, the one that the server derives; a switch of a pool remembers a bounded number of them."""
    keys = DerivedJobKeys(b"s" * 32, {JOB: KEY})
    assert keys.get(JOB) == KEY
    assert keys.get(job_number("other")) == job_switch_key(b"s" * 32, job_number("other"))
    assert len({keys[number] for number in range(10_000)}) == 10_000
    assert list(keys) == [JOB]


@pytest.mark.slow
@pytest.mark.parametrize("of_pool", [False, True])
def test_the_command_prints_address_and_counters(tmp_path, of_pool):
    """`isthmus switch --json` names its address, sums for a job with its key, and ends by Ctrl-C with counters."""
    file = tmp_path / "switch.keys"
    file.write_text("5e" * 32 if of_pool else f"job {KEY.hex()}\n")
    file.chmod(0o600)
    key = job_switch_key(b"\x5e" * 32, JOB) if of_pool else KEY
    option = "--pool-key-file" if of_pool else "--job-key-file"
    argv = [sys.executable, "-m", "isthmus", "switch", option, str(file), "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        found = json.loads(process.stdout.readline())
        host, _, port = found["address"].rpartition(":")
        assert (host, found["slots"], found["slot_integers"], found["jobs"]) == ("127.0.0.1", 1024, 256, 1 - of_pool)
        clients = sum_over((host, int(port)), 2, 10_000, key, batches=True)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [client.state for client in clients] == [ClientState.DONE] * 2
    counters = json.loads(out)
    assert counters["results"] == 80  # 40 parts, and 40 packets that agree on their scales
    assert key.hex() not in out + errors


def test_a_switch_for_other_machines_needs_keys(capsys):
    """Without a key file the command refuses an address that is not loopback, and names what to do."""
    argv = [sys.executable, "-m", "isthmus", "switch", "--host", "0.0.0.0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 2
    assert "a switch at 0.0.0.0 needs the keys of its jobs" in done.stderr
