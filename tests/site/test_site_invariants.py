"""`check_site` sees each kind of broken site, and names it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.site.devices.device_count_allocator import DeviceCountAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import OrdersReceived
from isthmus.site.parts import SiteWorker
from isthmus.site.site_invariants import SiteInvariantError, check_site
from tests.site.driver import Site, local
from tests.site.samples import order, orders


def _devices(site: Site, job: str, *devices: str) -> None:
    site.part(job).workers[0].devices = devices


def _queue_as_local(site: Site) -> None:
    waiting = site.machine.site.queued_pool
    site.machine.site.queued_local.update(waiting)
    waiting.clear()


BREAKS: dict[str, Callable[[Site], object]] = {
    "part held/1 (prepared) lacks devices": lambda site: _devices(site, "held"),
    "part held/1 (prepared) has devices that do not exist": lambda site: _devices(site, "held", "l40s/0/0"),
    "devices ['h20/0/1'] have two holders": lambda site: _devices(site, "held", "h20/0/1"),
    "devices ['l40s/0/1'] have two claimers": lambda site: _devices(site, "claim", "l40s/0/1"),
    "part waits/1 (queued) has devices": lambda site: _devices(site, "waits", "h20/0/2"),
    "1 free and 3 taken of 5 devices": lambda site: site.machine.parts.pop(("held", 1)),
    "the pool has 2 devices of 'h20', the owner allows 1": lambda site: setattr(
        site.machine.site, "policy", OwnerPolicy(pool_chips={"h20": 1})
    ),
    "part held/1 (prepared) has changed since it was reported": lambda site: setattr(site.part("held"), "detail", "x"),
    "part held/1 (new) does not belong in the table": lambda site: setattr(site.part("held"), "state", "new"),
    "part held/1 (forgotten) does not belong in the table": lambda site: setattr(
        site.part("held"), "state", "forgotten"
    ),
    "part held/1 (prepared) has a live worker": lambda site: setattr(site.part("held").workers[0], "live", True),
    "part gone/1 (released) still has workers": lambda site: site.part("gone").set_workers(
        {0: SiteWorker(node_group="h20", chips=1)}
    ),
    "the queue index is wrong": lambda site: site.machine.site.queued_pool.clear(),
    "a part of the pool is queued as local": _queue_as_local,
    "missing timers: {('held', 1)}": lambda site: site.machine.site.time_dependent.pop(("held", 1)),
}


@pytest.mark.parametrize("words", BREAKS)
def test_a_broken_site_is_named(words: str) -> None:
    """The site is consistent until one thing is changed behind the machine's back."""
    site = Site()
    site.obey(
        *(order("prepared", job, places=["east/h20"]) for job in ("held", "other")),
        *(order("ready", job, places=["east/l40s"]) for job in ("claim", "next")),
        order("queued", "waits", places=["east/h20"]),
        order("released", "gone"),
    )
    if "changed" in words:
        site.machine.observed_parts()
    check_site(site.machine)
    BREAKS[words](site)
    with pytest.raises(SiteInvariantError, match=f"^{re.escape(words)}$"):
        check_site(site.machine)


@pytest.mark.parametrize("held", [-1, 4])
def test_counts_of_free_devices_stay_between_none_and_all(held: int) -> None:
    """Devices without ids are only counted; a count beyond the inventory is a bug."""
    machine = SiteMachine("east", DeviceCountAllocator({"h20": 3}))
    machine.handle(OrdersReceived(now_s=0, orders=orders(order("prepared", places=["east/h20"] * 3))))
    check_site(machine)
    assert isinstance(machine.site.devices, DeviceCountAllocator)
    machine.site.devices.held["h20"] = held
    with pytest.raises(SiteInvariantError, match=f"^{3 - held} of 3 devices of 'h20' are free$"):
        check_site(machine)


def test_running_failed_and_stopping_parts_may_have_live_workers() -> None:
    """Their processes end later than the state that says so."""
    site = Site()
    site.local(local("stops", 1))
    for desired in ("prepared", "running"):
        site.obey(*(order(desired, job, places=["east/l40s"]) for job in ("runs", "fails")))  # type: ignore[arg-type]
    site.local()
    site.see("absent", job="fails")
    states = {part.job: part.state for part in site.machine.parts.values() if part.live}
    assert states == {"stops": "stopping", "runs": "running", "fails": "failed"}
