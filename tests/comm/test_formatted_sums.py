"""Rules of all-reduces in a wire format: fewer bytes between clusters, equal bits at all ranks, bounded errors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from isthmus.comm.group.formatted_sums import FormattedSums
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.comm.wire_formats.error_feedback import ErrorFeedback
from isthmus.comm.wire_formats.known_formats import WIRE_FORMATS
from isthmus.core.errors import PeerError, PlanError
from tests.comm.test_collectives import close


def groups_over(clusters: str) -> list[IsthmusGroup]:
    return [IsthmusGroup(one, list(clusters)) for one in memory_transports(len(clusters))]


def at_all(groups: list[IsthmusGroup], call: Callable[[IsthmusGroup, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups, range(len(groups))))


def crossing_bytes(groups: list[IsthmusGroup], clusters: str) -> int:
    return sum(
        traffic.sent_bytes
        for rank, group in enumerate(groups)
        for peer, traffic in group.transport.traffic().items()
        if clusters[peer] != clusters[rank]
    )


@pytest.mark.parametrize("name", list(WIRE_FORMATS))
@pytest.mark.parametrize("clusters", ["ab", "aabb", "abc", "aabcc"])
@pytest.mark.parametrize("size", [1, 1000, 70_000])
def test_sums_are_equal_bits_within_the_bounds(name: str, clusters: str, size: int) -> None:
    """Every rank ends with the same bits; the error is that of one rounding of each cluster's sum and of the total."""
    groups, numbers = groups_over(clusters), np.random.default_rng(3)
    values = [numbers.normal(size=size).astype(np.float32) for _ in clusters]

    def call(group: IsthmusGroup, rank: int) -> bytes:
        tensor = torch.from_numpy(values[rank].copy())
        group.use_method(FormattedSums(group, name))
        group.allreduce([tensor]).wait()
        return tensor.numpy().tobytes()

    got = at_all(groups, call)
    assert len(set(got)) == 1
    exact = np.sum(values, axis=0, dtype=np.float64)
    sums = {
        one: np.sum([v for v, c in zip(values, clusters, strict=True) if c == one], axis=0) for one in set(clusters)
    }
    largest = max(float(np.abs(one).max()) for one in [*sums.values(), exact])
    worst = np.full(size, largest, np.float32)
    bound = (len(sums) + 1) * WIRE_FORMATS[name].error_bound(worst) * 1.1 + len(clusters) * largest * 2.0**-23
    assert (np.abs(np.frombuffer(got[0], np.float32) - exact) <= bound).all()
    close(groups)


def test_bytes_between_clusters_fall_with_the_format() -> None:
    """Counted on the transport: half with 2 bytes a value, a quarter with 1, of what fp32 sends."""
    sent = {}
    for name in WIRE_FORMATS:
        groups = groups_over("aabb")

        def call(group: IsthmusGroup, rank: int, name: str = name) -> None:
            group.use_method(FormattedSums(group, name))
            group.allreduce([torch.ones(2**18)]).wait()

        at_all(groups, call)
        sent[name] = crossing_bytes(groups, "aabb")
        close(groups)
    ratios = {name: num / sent["fp32"] for name, num in sent.items()}
    assert sent["fp32"] == 2 * 4 * 2**18
    assert ratios == pytest.approx(
        {"fp32": 1, "bf16": 0.5, "scaled-int32": 1, "scaled-int16": 0.5, "block-int8": 0.2539}, abs=1e-3
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clusters", ["ab", "aabbcc"])
def test_non_finite_values_fail_every_rank_by_name(bad: float, clusters: str) -> None:
    """Under a scaled format, NaN or infinity at one rank is the named error of all."""
    groups = groups_over(clusters)

    def call(group: IsthmusGroup, rank: int) -> str:
        group.use_method(FormattedSums(group, "scaled-int16"))
        tensor = torch.ones(100)
        if rank == 1:
            tensor[7] = bad
        with pytest.raises(PeerError) as raised:
            group.allreduce([tensor]).wait()
        return str(raised.value)

    messages = at_all(groups, call)
    assert all("NaN or infinity" in one for one in messages)
    close(groups)


def test_ranks_that_disagree_on_the_format_all_get_an_error() -> None:
    """The format is part of what ranks agree on."""
    groups = groups_over("ab")

    def call(group: IsthmusGroup, rank: int) -> str:
        group.use_method(FormattedSums(group, ["bf16", "scaled-int16"][rank]))
        with pytest.raises(PeerError) as raised:
            group.allreduce([torch.ones(100)]).wait()
        return str(raised.value)

    assert all("in bf16" in one or "in scaled-int16" in one for one in at_all(groups, call))
    close(groups)


def test_error_feedback_keeps_what_rounding_takes() -> None:
    """Over 30 steps of an 8-bit format, the accumulated sum stays within a rounding of the exact one."""
    groups = groups_over("ab")
    gradient = torch.full((256,), 0.001)
    gradient[0] = 1.0

    def call(group: IsthmusGroup, rank: int) -> tuple[float, float]:
        method, total, plain = FormattedSums(group, "block-int8"), torch.zeros(256), torch.zeros(256)
        group.use_method(method)
        feedback, operation = ErrorFeedback(), _sum()
        for _ in range(30):
            tensor = gradient.clone()
            method.all_reduce(tensor, operation, feedback=feedback).wait()
            total += tensor
            tensor = gradient.clone()
            method.all_reduce(tensor, operation).wait()
            plain += tensor
        return float(total[1]), float(plain[1])

    for with_feedback, without in at_all(groups, call):
        assert abs(with_feedback - 0.06) <= 2 / 253
        assert without == 0
    close(groups)


def test_what_is_not_float32_goes_the_usual_way() -> None:
    """Other dtypes and operations, and groups inside one cluster, are summed exactly; an unknown name is refused."""
    groups = groups_over("ab")

    def call(group: IsthmusGroup, rank: int) -> tuple[list[int], float]:
        group.use_method(FormattedSums(group, "block-int8"))
        integers = torch.tensor([2**40 + rank])
        largest = torch.tensor([0.1 + rank])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        group.allreduce([integers]).wait()
        group.allreduce([largest], options).wait()
        with pytest.raises(PlanError, match="unknown wire format 'int4'"):
            FormattedSums(group, "int4")
        return integers.tolist(), float(largest)

    assert at_all(groups, call) == [([2**41 + 1], pytest.approx(1.1))] * 2
    close(groups)


def _sum() -> Any:
    from isthmus.comm.group.reduce_operation import ReduceOperation

    return ReduceOperation.of(dist.ReduceOp.SUM)
