"""Rules of PASSING in a process group: real UDP, real switches, exact equal sums, also without the switch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.passing.passing_sums import PassingOptions, PassingSums
from isthmus.comm.group_conformance import check_process_group
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.errors import PeerError, PlanError
from isthmus.core.messages.datagram import Datagram
from isthmus.switch import SlotPool, job_number
from isthmus.wan import UdpSocket
from tests.comm.test_collectives import close
from tests.switch.served import served

pytestmark = pytest.mark.integration

KEY = b"k" * 32


def pool(incarnation: int = 1, **changes: Any) -> SlotPool:
    values = {"keys": {job_number("job"): KEY}, "incarnation": incarnation, "secret": b"s"} | changes
    return SlotPool(256, 256, **values)


def groups_over(clusters: str, options: PassingOptions, timeout_s: float = 60) -> list[IsthmusGroup]:
    groups = [IsthmusGroup(one, list(clusters)) for one in memory_transports(len(clusters))]
    for group in groups:
        group.runner.timeout_s = timeout_s
        group.use_method(PassingSums(group, options))
    return groups


def at_all(groups: list[IsthmusGroup], call: Callable[[IsthmusGroup, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(call, groups, range(len(groups))))


def sums(groups: list[IsthmusGroup], values: list[np.ndarray], op: Any = dist.ReduceOp.SUM) -> list[np.ndarray]:
    def call(group: IsthmusGroup, rank: int) -> np.ndarray:
        tensor, options = torch.from_numpy(values[rank].copy()), dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce([tensor], options).wait()
        return tensor.numpy()

    return at_all(groups, call)


def check(got: list[np.ndarray], values: list[np.ndarray], num_clusters: int, factor: float = 1.0) -> None:
    """Equal bits at all ranks, within the error of the integers and of float32 sums."""
    assert len({one.tobytes() for one in got}) == 1
    exact = np.sum(values, axis=0, dtype=np.float64)
    largest = float(np.abs(values).max()) * len(values)
    bound = num_clusters**2 * largest / 2**31 + len(values) * largest * 2.0**-23
    assert np.abs(got[0].astype(np.float64) - exact * factor).max() <= bound


def random_values(clusters: str, size: int, seed: int = 0) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [numbers.normal(size=size).astype(np.float32) for _ in clusters]


@pytest.mark.parametrize(
    ("clusters", "num_switches"), [("aabb", 1), ("aabb", 2), ("abc", 1), ("aabbb", 1), ("abab", 1), ("aabb", 0)]
)
def test_sums_by_switches(clusters: str, num_switches: int) -> None:
    """2 hosts of 2 workers and other shapes, one sum after another; without a switch by parameter servers."""
    with _served(num_switches) as addresses:
        groups = groups_over(clusters, PassingOptions(switches=addresses, key=KEY, slots=16))
        for size in (100_000, 3, 1, 777):
            values = random_values(clusters, size)
            check(sums(groups, values), values, len(set(clusters)))
        values = random_values(clusters, 500)
        check(sums(groups, values, dist.ReduceOp.AVG), values, len(set(clusters)), 1 / len(clusters))
        workers = [group.method.worker for group in groups]
        used = {worker.counters["parts_without_switch"] for worker in workers if worker is not None}
        assert (used == {0}) == bool(num_switches)
        close(groups)


@contextmanager
def _served(num: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the addresses of `num` switches; all slots are free at the end, as the workers left."""
    if num == 0:
        yield ()
        return
    one = pool(num)
    with served(one) as address, _served(num - 1) as others:
        yield (address, *others)
        assert one.statistics()["rejected"] == {}


@contextmanager
def switch_process() -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    argv = [sys.executable, "-m", "isthmus", "switch", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        host, _, port = json.loads(process.stdout.readline())["address"].rpartition(":")
        yield process, (host, int(port))
        process.kill()


class _KillsSwitch(UdpSocket):
    """Kills a process with the datagram number `after`."""

    process: subprocess.Popen[str]
    after: int
    sent = 0

    def send(self, datagram: Datagram) -> None:
        type(self).sent += 1
        if type(self).sent == self.after:
            self.process.send_signal(signal.SIGKILL)
        super().send(datagram)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 12, 60, 300])
def test_a_switch_that_is_killed_within_a_sum(after: int) -> None:
    """2 hosts x 2 workers end with equal exact sums; the next sum does not wait for the switch again."""
    with switch_process() as (process, address):
        opened = type("Opened", (_KillsSwitch,), {"process": process, "after": after, "sent": 0})
        groups = groups_over("aabb", PassingOptions(switches=(address,), open_socket=opened))
        values = random_values("aabb", 400_000)
        for _ in range(2):
            check(sums(groups, values), values, 2)
        assert process.wait(10) == -signal.SIGKILL
        for group in groups:
            assert group.method.worker.counters["switch_failures"] == 1
            assert group.method.worker.counters["parts_without_switch"] > 0
            why = group.method.worker.failure
            assert "has sent nothing" in why or "goes on without the switch" in why
        close(groups)


def test_lost_packets_are_repaired() -> None:
    """5 % of the datagrams of both directions are lost, by a seed: equal exact sums by the switch."""

    class Lossy(UdpSocket):
        numbers = np.random.default_rng(5)

        def send(self, datagram: Datagram) -> None:
            if self.numbers.random() >= 0.05:
                super().send(datagram)

        def receive(self) -> Iterator[Datagram]:
            return (one for one in super().receive() if self.numbers.random() >= 0.05)

    with served(pool()) as address:
        groups = groups_over("aabb", PassingOptions(switches=(address,), key=KEY, slots=16, open_socket=Lossy))
        values = random_values("aabb", 100_000)
        check(sums(groups, values), values, 2)
        close(groups)


@pytest.mark.parametrize("changes", [{"keys": {}}, {"keys": {job_number("job"): b"o" * 32}}, {"lease_s": 1e-9}])
def test_a_switch_that_refuses_is_left(changes: dict[str, Any]) -> None:
    """An unknown job, a wrong key, slots that are given to others: the sums are right without it."""
    with served(pool(**changes)) as address:
        groups = groups_over("ab", PassingOptions(switches=(address,), key=KEY))
        values = random_values("ab", 1000)
        check(sums(groups, values), values, 2)
        close(groups)


def test_jobs_of_one_name_are_apart() -> None:
    """Two runs with one name and key share a switch; each gets its own sums."""
    with served(pool()) as address:
        options = PassingOptions(switches=(address,), key=KEY, slots=16)
        runs = [groups_over("ab", options), groups_over("ab", options)]
        values = [random_values("ab", 20_000, seed) for seed in range(2)]
        with ThreadPoolExecutor(2) as threads:
            got = list(threads.map(sums, runs, values))
        for one, of in zip(got, values, strict=True):
            check(one, of, 2)
        for groups in runs:
            close(groups)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_fail_every_rank(bad: float) -> None:
    """Also ranks that lead no share; the error names what was wrong."""
    with served(pool()) as address:
        groups = groups_over("aabbb", PassingOptions(switches=(address,), key=KEY))
        values = random_values("aabbb", 1000)
        values[4][999] = bad

        def call(group: IsthmusGroup, rank: int) -> str:
            with pytest.raises(PeerError) as raised:
                group.allreduce([torch.from_numpy(values[rank])]).wait()
            return str(raised.value)

        assert all("NaN or infinity" in one for one in at_all(groups, call))
        close(groups)


def test_ranks_that_disagree_or_are_missing_fail_by_name() -> None:
    """Another size, and a rank that never calls: an error at every rank that did, within the time-out."""
    with served(pool()) as address:
        options = PassingOptions(switches=(address,), key=KEY)
        for sizes in ((1000, 1000, 1200, 1200), (1000, 1000, 1000, None)):
            groups = groups_over("aabb", options, timeout_s=2)

            def call(group: IsthmusGroup, rank: int, sizes: Any = sizes) -> str:
                if sizes[rank] is None:
                    return ""
                with pytest.raises(PeerError) as raised:
                    group.allreduce([torch.ones(sizes[rank])]).wait()
                return str(raised.value)

            errors = at_all(groups, call)
            assert all("sums" in one or "nothing from" in one or "float32" in one for one in errors if one), errors
            close(groups)


def test_a_switch_that_has_no_address_is_named() -> None:
    """The error says which, and what to do."""
    (group, _) = (IsthmusGroup(one, ["a", "b"]) for one in memory_transports(2))
    with pytest.raises(PlanError, match=r"switch nowhere\.invalid:1 is unknown"):
        PassingSums(group, PassingOptions(switches=(("nowhere.invalid", 1),)))


@pytest.mark.parametrize("clusters", ["ab", "aab"])
def test_the_conformance_kit_passes_with_a_switch(clusters: str) -> None:
    """All collectives, of which float32 sums go by the switch; ranks that disagree all get an error."""
    with served(pool()) as address:
        options = PassingOptions(switches=(address,), key=KEY, slots=8)
        groups = groups_over(clusters, options)
        check_process_group(
            groups,
            dtypes=(torch.float32, torch.int64),
            make=lambda: groups_over(clusters, options, timeout_s=2),
        )
        close(groups)
