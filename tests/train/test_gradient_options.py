"""Rules of a job's `synchronisation: passing` and `wire_format`: the sums, the losses, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.passing.passing_sums import PassingOptions
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.comm.wire_formats.known_formats import WIRE_FORMATS
from isthmus.core.errors import InputError, PlanError
from isthmus.core.job_parts.runtime_choice import RuntimeChoice, WireFormatName
from isthmus.core.messages.switch_keys import job_number
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerKeys, WorkerSpec
from isthmus.core.pool import Aggregators
from isthmus.switch import SlotPool
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.process.take_rank_keys import take_rank_keys
from isthmus.train.update.buckets import HeldRows, make_buckets
from isthmus.train.update.gradient_options import GradientOptions
from isthmus.train.update.gradient_reducer import GradientReducer
from tests.switch.served import served
from tests.train.replica_threads import Cut, make_plan
from tests.train.test_worker import moved
from tests.train.threads import GroupExchange
from tests.train.worker_jobs import SWITCH_KEY, Workers, keys_of, make_job, run_job, started, whole
from tests.train.worker_jobs import make_plan as make_stages

CLUSTERS = "aabb"
ROWS, COLUMNS = 300, 70
Steps = list[list[np.ndarray]]


def reduced(
    options: GradientOptions, steps: Steps, clusters: str = CLUSTERS, scales: Sequence[float] = (), **more: Any
) -> list[GroupExchange]:
    """Sum `steps[s][rank]` [ROWS, COLUMNS], times `scales[s]`, in place over ranks in threads, step after step."""
    held = [[HeldRows.full("w", (ROWS, COLUMNS))] for _ in clusters]
    groups = [IsthmusGroup(one, list(clusters)) for one in memory_transports(len(clusters))]
    exchanges = [GroupExchange(clusters, one) for one in groups]

    def run(rank: int) -> None:
        reducer = GradientReducer(make_buckets(held, clusters, 4096), rank, exchanges[rank], options=options, **more)
        for number, values in enumerate(steps):
            tensor = torch.from_numpy(values[rank])
            if number and scales:
                reducer.rescale_errors(scales[number] / scales[number - 1])
            reducer.reduce(lambda one: tensor[one.start : one.stop], to_all_owners=True)  # noqa: B023
        reducer.close()

    at_all(run, len(clusters))
    for group in groups:
        group.shutdown()
    return exchanges


def at_all(call: Callable[[int], Any], num: int) -> list[Any]:
    with ThreadPoolExecutor(num) as pool:
        return [one.result(120) for one in [pool.submit(call, rank) for rank in range(num)]]


def random_steps(num: int, clusters: str = CLUSTERS) -> Steps:
    numbers = np.random.default_rng(5)
    return [[numbers.normal(size=(ROWS, COLUMNS)).astype(np.float32) for _ in clusters] for _ in range(num)]


def exact_sums(steps: Steps) -> list[np.ndarray]:
    return [np.sum(values, axis=0, dtype=np.float64) for values in steps]


def test_a_job_may_name_each_wire_format() -> None:
    """The names of the job file are those of the formats; none is used unasked, or with another synchronisation."""
    assert RuntimeChoice().wire_format is None
    assert get_args(WireFormatName) == tuple(WIRE_FORMATS)
    with pytest.raises(ValidationError, match="bf16 does not go with synchronisation passing"):
        RuntimeChoice(wire_format="bf16", synchronisation="passing")


@pytest.mark.parametrize("name", list(WIRE_FORMATS))
def test_gradients_in_a_wire_format_are_equal_bits_within_its_bound(name: str) -> None:
    """One rounding of each cluster's sum and of the total; the bytes across are those of the format."""
    steps = random_steps(1)
    wanted, plain = exact_sums(steps)[0], reduced(GradientOptions(), random_steps(1))
    exchanges = reduced(GradientOptions(wire_format=name), steps)
    (got,) = steps
    assert len({one.tobytes() for one in got}) == 1
    largest = np.full(ROWS * COLUMNS, 2 * np.abs(wanted).max(), np.float32)
    bound = 3 * WIRE_FORMATS[name].error_bound(largest).max() + 4 * largest[0] * 2.0**-23
    assert np.abs(got[0] - wanted).max() <= bound
    sent, before = (sum(one.timer.wan_bytes for one in of) for of in (exchanges, plain))
    each = WIRE_FORMATS[name].num_bytes(4096) / (4 * 4096)
    assert sent == pytest.approx(each * before, rel=0.02)


def test_block_int8_gives_back_what_rounding_took() -> None:
    """Summed over 20 equal steps, the error stays that of one step; without feedback it would be 20 times that."""
    steps = [[one.copy() for one in random_steps(1)[0]] for _ in range(20)]
    wanted = np.sum(exact_sums(steps), axis=0)
    reduced(GradientOptions(wire_format="block-int8"), steps)
    error = np.abs(np.sum([values[0].astype(np.float64) for values in steps], axis=0) - wanted).max()
    assert 0 < error <= 4 * np.abs(exact_sums(random_steps(1))[0]).max() / 127


def test_block_int8_gives_rounding_back_in_the_next_steps_loss_scale() -> None:
    """Of fp16's scaled gradients: a rounding error of a step at 1024 times the scale is not added 1024 times."""
    scales = [1024.0, 1.0, 1.0, 2.0]
    steps = [[one * np.float32(scale) for one in random_steps(1)[0]] for scale in scales]
    wanted = len(scales) * exact_sums(random_steps(1))[0]
    reduced(GradientOptions(wire_format="block-int8"), steps, scales=scales)
    found = np.sum([values[0].astype(np.float64) / scale for values, scale in zip(steps, scales, strict=True)], axis=0)
    assert 0 < np.abs(found - wanted).max() <= 4 * np.abs(exact_sums(random_steps(1))[0]).max() / 127


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [
    GradientOptions(wire_format="block-int8"), GradientOptions(strategy="passing", passing=PassingOptions())
])  # fmt: skip
def test_a_gradient_that_is_not_finite_reaches_all_ranks(bad: float, options: GradientOptions) -> None:
    """The step is skipped by its norm, as in fp32, and the next one is summed as before."""
    steps = random_steps(2)
    wanted = exact_sums(steps)[1]
    steps[0][3][7, 7] = bad
    reduced(options, steps)
    assert not any(np.isfinite(one[7, 7]) for one in steps[0])
    assert all(np.abs(one - wanted).max() < 0.2 for one in steps[1])


@pytest.mark.parametrize("clusters", ["aabb", "aab", "abc", "aaaa"])
def test_switches_sum_gradients(clusters: str) -> None:
    """Equal bits, of integers that cannot overflow; ranks of one cluster alone use no switch."""
    pool = SlotPool(512, 256, keys={job_number("job"): b"k" * 32}, incarnation=1, secret=b"s")
    steps = random_steps(3, clusters)
    wanted = exact_sums(steps)
    with served(pool) as address:
        passing = PassingOptions(switches=(address,), key=b"k" * 32)
        exchanges = reduced(GradientOptions(strategy="passing", passing=passing), steps, clusters)
    for values, total in zip(steps, wanted, strict=True):
        assert len({one.tobytes() for one in values}) == 1
        assert np.abs(values[0] - total).max() <= 4 * np.abs(total).max() * len(clusters) * 2.0**-23
    assert (pool.counters["added"] > 0) == (len(set(clusters)) > 1)
    assert not any(pool.rejected.values())
    sent = sum(one.timer.wan_bytes for one in exchanges)
    assert sent == (3 * 4 * ROWS * COLUMNS * len(set(clusters)) if len(set(clusters)) > 1 else 0)


def spec_of(folder: Path, runtime: dict[str, str], **changes: Any) -> WorkerSpec:
    job = make_job(folder, runtime=runtime)
    return WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=make_stages(job, [2, 4], "ab"), **changes)


SWITCH = Aggregators(kind="switch", addresses=("127.0.0.1:1",), slot_bytes=1024)


def test_what_cannot_be_is_refused_before_start(tmp_path: Path) -> None:
    """Passing without a switch, or with gloo; a wire format with gloo; a switch beyond this machine without a key."""
    passing = {"synchronisation": "passing"}
    check_plan_supported(spec_of(tmp_path, passing, switches=(SWITCH,)))
    check_plan_supported(spec_of(tmp_path, {"wire_format": "bf16"}))
    with pytest.raises(PlanError, match=r"none of the clusters a, b states the address.*addresses: \[HOST:PORT\]"):
        check_plan_supported(spec_of(tmp_path, passing))
    with pytest.raises(PlanError, match=r"a group of torch itself \(gloo\).*leave runtime.synchronisation out"):
        check_plan_supported(spec_of(tmp_path, passing, switches=(SWITCH,), backend="gloo"))
    with pytest.raises(PlanError, match=r"wire_format 'bf16'.*\(gloo\).*leave runtime.wire_format out"):
        check_plan_supported(spec_of(tmp_path, {"wire_format": "bf16"}, backend="gloo"))
    integers = spec_of(tmp_path, {"wire_format": "block-int8"})
    early = integers.model_copy(update={"plan": integers.plan.model_copy(update={"overlap_gradients": True})})
    with pytest.raises(PlanError, match=r"wire_format 'block-int8' sums integers.*remove overlap_gradients"):
        check_plan_supported(early)
    far = spec_of(tmp_path, passing, switches=(SWITCH.model_copy(update={"addresses": ("10.0.0.9:8475",)}),))
    folder = WorkerFolder(tmp_path / "rank-0")
    folder.write_keys(WorkerKeys(keys=keys_of("a", far.plan).keys))
    with pytest.raises(InputError, match=r"no key for the switch at 10\.0\.0\.9:8475.*--switch-key-file"):
        take_rank_keys(folder, far)
    folder.write_keys(keys_of("a", far.plan))
    taken = take_rank_keys(folder, far)
    assert taken.switch == bytes.fromhex(SWITCH_KEY)
    assert SWITCH_KEY not in repr(taken) + repr(keys_of("a", far.plan))


@pytest.mark.parametrize(("text", "why"), [
    ("10.0.0.9", "not an address and a port"), ("10.0.0.9:0", "not an address and a port"), (":1", "not an address"),
])  # fmt: skip
def test_a_malformed_address_of_a_switch_is_refused(text: str, why: str) -> None:
    """With an example; so are addresses of servers, and fewer addresses than switches."""
    with pytest.raises(ValidationError, match=why):
        Aggregators(kind="switch", addresses=(text,))
    with pytest.raises(ValidationError, match="ranks play the servers"):
        Aggregators(kind="server", addresses=("10.0.0.9:1",))
    with pytest.raises(ValidationError, match="1 addresses of 2 switches"):
        Aggregators(kind="switch", count=2, addresses=("10.0.0.9:1",))


def losses_of(workers: Workers) -> list[float]:
    (reporter,) = [
        rank for rank in range(len(workers.folders)) if any("loss" in one.values for one in workers.metrics(rank))
    ]
    return [one.values["loss"] for one in workers.metrics(reporter)]


CUTS = [Cut(ends=[4], clusters=one, micro_batches=1, size=2) for one in "aabb"]


@pytest.mark.slow
def test_jobs_over_two_clusters_train_what_one_process_trains(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Four replicas in two clusters, by a switch with a key and in the formats: the losses of one process.

    In bf16 and block-int8, with `--whole` in scaled-int32 too.
    A rounding of the gradients by the relative bound b of the format moves a loss by about b of what training has
    changed it; 10 steps change it by less than 1.
    """
    alone = run_job(
        tmp_path / "alone", moved(make_job(tmp_path, steps=10), tmp_path / "alone"), whole(make_job(tmp_path))
    )
    keys = {job_number("job-1"): bytes.fromhex(SWITCH_KEY)}
    pool = SlotPool(512, 256, keys=keys, incarnation=1, secret=b"s")
    bounds = {"passing": 1e-4, "bf16": 1 / 256, "block-int8": 1 / 127}
    if request.config.getoption("--whole"):
        bounds["scaled-int32"] = 1e-4
    with served(pool) as (host, port):
        switch = SWITCH.model_copy(update={"addresses": (f"{host}:{port}",)})
        for name, bound in bounds.items():
            runtime = {"synchronisation" if name == "passing" else "wire_format": name}
            job = moved(make_job(tmp_path, steps=10, runtime=runtime), tmp_path / name)
            plan = make_plan(CUTS, job.training.sequence_length)
            with started(tmp_path / name, job, plan, switches=(switch,)) as workers:
                assert workers.wait() == [0] * 4, [workers.log(rank) for rank in range(4)]
            assert losses_of(workers) == pytest.approx(alone.losses(), abs=bound), name
            assert not any(SWITCH_KEY in workers.log(rank) for rank in range(4))
            assert not any(SWITCH_KEY in one.spec_path.read_text() for one in workers.folders)
    assert pool.counters["added"] > 0
    assert not any(pool.rejected.values())
