"""The conformance kit passes for gloo, the fakes, and the group: inside a cluster and over several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from isthmus.comm.group.check_collectives import GLOO_DTYPES, wrapped
from isthmus.comm.group.composed.composition import Composition, agree
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.vendors.gloo_vendor import GLOO, gloo_group
from isthmus.comm.group.vendors.known_vendors import VENDORS
from isthmus.comm.group.vendors.memory_vendor import memory_vendor
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.comm.group_conformance import check_process_group
from isthmus.comm.transport.memory_transport import memory_transports
from tests.comm.ranks import LIMIT, isthmus_groups, library_groups, part_of
from tests.comm.relay import Relay

pytestmark = pytest.mark.integration

SOON_S = 2.0
FEW = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
EAGER = replace(GLOO, short_bytes=2**10, chunk_bytes=2**10)
"""gloo with low limits, so that tensors of the kit go every way."""


def wrapped_gloo(size: int) -> list[dist.ProcessGroup]:
    """Return gloo's groups as torch wraps them."""
    store = dist.HashStore()

    def make(rank: int) -> dist.ProcessGroup:
        return wrapped(gloo_group(store, rank, size, "127.0.0.1", LIMIT), store, rank, size)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def over_the_fake(clusters: str, timeout_s: float = 30.0) -> list[IsthmusGroup]:
    """Return groups over the fake transport, without libraries."""
    timeout = type(LIMIT)(seconds=timeout_s)
    return [IsthmusGroup(one, list(clusters), timeout=timeout) for one in memory_transports(len(clusters))]


def close(groups: list[IsthmusGroup]) -> None:
    """Close all at once."""
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(lambda group: group.shutdown(), groups))


def test_gloo_conforms() -> None:
    """The kit asks for nothing that gloo does not do, uneven sizes and some dtypes aside."""
    check_process_group(wrapped_gloo(3), dtypes=GLOO_DTYPES, uneven=False)


@pytest.mark.parametrize("clusters", ["ab", "abcab"])
def test_the_group_conforms_over_the_fake(clusters: str) -> None:
    """Any spread over clusters; the group needs nothing of a transport but the seam."""
    groups = over_the_fake(clusters)
    check_process_group(groups)
    close(groups)


def test_parts_of_the_group_conform() -> None:
    """Any subset of the ranks, single ones included."""
    groups = over_the_fake("aab")
    check_process_group(groups, dtypes=FEW, split=part_of)
    close(groups)


def test_the_group_conforms_where_ranks_disagree() -> None:
    """By steps."""
    check_process_group(over_the_fake("aab"), dtypes=FEW[:1], make=partial(over_the_fake, "aab", SOON_S))


@pytest.mark.parametrize("clusters", ["aaa", "aabb", "aab", "abcab", "aaabb"])
@pytest.mark.parametrize("vendor", [memory_vendor(short_bytes=2**10, chunk_bytes=2**10), EAGER], ids=["fake", "gloo"])
def test_the_group_conforms_with_a_library_inside_its_clusters(clusters: str, vendor: Vendor) -> None:
    """Alone in a cluster; composed with messages between clusters, short and in chunks, equal and unequal clusters."""
    groups = library_groups(clusters, vendor)
    check_process_group(groups, dtypes=FEW, messages=vendor is EAGER)
    close(groups)


@pytest.mark.parametrize("clusters", ["aabb", "aab"])
@pytest.mark.parametrize("vendor", [memory_vendor(short_bytes=2**10, chunk_bytes=2**10), EAGER], ids=["fake", "gloo"])
def test_a_composed_group_conforms_where_ranks_disagree(clusters: str, vendor: Vendor) -> None:
    """Ranks of a cluster agree before they call the library, which may end the process where sizes differ."""
    groups = library_groups(clusters, vendor)
    check_process_group(groups, dtypes=(), messages=False, make=partial(library_groups, clusters, vendor, SOON_S))
    close(groups)


@pytest.mark.slow
@pytest.mark.parametrize("clusters", ["aaa", "aabb"])
def test_the_group_conforms_over_tcp_and_gloo(clusters: str) -> None:
    """TCP between clusters, gloo inside them; composed where the group spans clusters."""
    composition = agree([{"cpu": EAGER}] * len(clusters), clusters)
    with isthmus_groups(clusters, composition=composition) as groups:
        check_process_group(groups, dtypes=FEW)


def test_the_group_conforms_through_a_proxy() -> None:
    """It does through a route as well."""
    with Relay() as relay, isthmus_groups("aab", relay.address) as groups:
        check_process_group(groups, dtypes=FEW[:1])


def test_each_library_that_torch_reports_is_known_by_one_name() -> None:
    """A name and a type of device each; what is not here is left out, and a CPU has gloo."""
    assert len({one.name for one in VENDORS}) == len(VENDORS)
    missing = [one.name for one in VENDORS if not one.is_available()]
    assert "gloo" not in missing


@pytest.mark.parametrize("vendor", [one for one in VENDORS if one is not GLOO], ids=lambda one: one.name)
def test_a_library_of_an_accelerator_conforms(vendor: Vendor) -> None:
    """One rank of it, as one device allows; and its tensors in a group over two clusters."""
    if not vendor.is_available() or vendor.device_type == "cpu":
        pytest.skip(f"no {vendor.name} here: torch reports no {vendor.device_type} device with it")
    store, kind = dist.HashStore(), vendor.device_type
    group = wrapped(vendor.create(store, 0, 1, "127.0.0.1", LIMIT), store, 0, 1, kind)
    check_process_group([group], dtypes=FEW[:2], messages=False, uneven=False, device=kind)
    groups = over_the_fake("ab")
    check_process_group(groups, dtypes=FEW, device=kind)
    close(groups)


def test_a_group_whose_ranks_have_no_library_in_common_goes_by_steps() -> None:
    """A cluster without one leaves the others theirs for nothing: all ranks go one way."""
    both, other = {"cpu": GLOO}, {"cpu": replace(GLOO, name="other")}
    assert agree([both, other, both, both], "aabb") is None
    assert agree([both, both, other, other], "aabb") is not None
    assert agree([{}, both], "ab") == Composition(
        GLOO.short_bytes, GLOO.chunk_bytes, GLOO.dtypes, frozenset(GLOO.operations)
    )
