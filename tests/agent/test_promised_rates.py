"""What the pool promises a job on a link is stated for the edge: while it runs, for its ranks' packets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.agent.network.promised_rates import promised_rates
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import PartOrder, RankMap, WorkerAddress
from isthmus.core.plan import Plan, Prediction
from isthmus.core.pool import Link
from isthmus.core.pool_resource import PoolResource
from isthmus.site.parts import SitePart
from isthmus.wan import Admission, edge_settings
from tests.agent.test_shell import Site
from tests.full_disk import full_disk
from tests.site.samples import JOB, order, plan

LINKS = tuple(
    Link.model_validate({"from": one, "to": other, "bandwidth_gbps": 2, "delay_ms": 5})
    for one, other in (("east", "west"), ("west", "east"))
)
RANKS = RankMap(
    workers=(
        WorkerAddress(rank=0, cluster="east", host="10.1.0.5", port=9000),
        WorkerAddress(rank=1, cluster="west", host="10.2.0.6", port=9001),
    )
)


def sending(gbps: float) -> Plan:
    """Return the plan of two stages with a rate of its one hop."""
    known = plan().predicted
    assert known is not None
    told = Prediction(**(known.model_dump() | {"wan_gbps": (gbps,)}))
    return plan().model_copy(update={"predicted": told})


def part(**fields: object) -> SitePart:
    """Return a running part at east."""
    given = {"state": "running", "spec": JOB, "plan": sending(0.7), "links": LINKS, "rank_map": RANKS} | fields
    return SitePart(job="a", attempt=1, **given)  # type: ignore[arg-type]


def test_a_running_part_has_its_plans_rate_to_each_other_site() -> None:
    """It is what the coordinator allocates; its packets are those to and from the ranks' listening ports."""
    (one,) = promised_rates(part(), "east")
    allocated = sending(0.7).link_kbps({PoolResource.link("east", "west"): 2.0})
    assert round(one.request.bandwidth_gbps * 1e6) == allocated[PoolResource.link("east", "west")] == 700_000
    assert (one.request.source, one.request.target) == ("east", "west")
    settings = edge_settings([one], "east", 1e9, 2.0)
    assert [found.rate_kbps for found in settings.classes] == [2_000_000, 1_300_000, 700_000]
    ports = sorted((flow.from_port or 0, flow.to_port or 0) for flow in one.request.flows)
    assert ports == [(0, 9001), (9000, 0)]


def test_a_link_is_never_promised_more_than_it_has() -> None:
    """A plan that would send more gets the whole link, as in the ledger."""
    (one,) = promised_rates(part(plan=sending(5.0)), "east")
    assert one.request.bandwidth_gbps == 2.0


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "prepared"},
        {"state": "stopping"},
        {"rank_map": None},
        {"plan": None},
        {"links": ()},
        {"plan": sending(0.0)},
        {"spec": JOB.model_copy(update={"placement": JOB.placement.model_copy(update={"network": False})})},
        {"rank_map": RankMap(workers=(RANKS.workers[0], RANKS.workers[1].model_copy(update={"host": "node.west"})))},
    ],
)
def test_nothing_is_promised_without_a_running_job_a_rate_and_addresses(fields: dict[str, object]) -> None:
    """Nor to a job that reserves no network, or whose ranks have names that no packet shows."""
    assert promised_rates(part(**fields), "east") == []


def test_names_are_unique_and_fit() -> None:
    """Two long jobs that differ in their last letter have two bookings; many ranks are told apart by machine."""
    names = set()
    for letter in "xy":
        one = part()
        one.job = "j" * 62 + letter
        names.add(promised_rates(one, "east")[0].request.name)
    assert len(names) == 2
    many = RankMap(
        workers=tuple(
            WorkerAddress(rank=rank, cluster=site, host=f"10.{number}.0.1", port=9000 + rank)
            for number, site in ((1, "east"), (2, "west"))
            for rank in range(number * 50 - 50, number * 50)
        )
    )  # fmt: skip
    (found,) = promised_rates(part(rank_map=many), "east")
    assert [(str(flow.from_network), str(flow.to_network)) for flow in found.request.flows] == [
        ("10.1.0.1/32", "10.2.0.1/32")
    ]


def running(desired: str) -> PartOrder:
    return order(desired, ranks=RANKS, links=LINKS).model_copy(update={"plan": sending(0.7)})  # type: ignore[arg-type]


def test_the_file_follows_the_parts(tmp_path: Path) -> None:
    """It is there from the agent's start, names a job while it runs, and is written again after a full disk."""
    file = tmp_path / "promises.json"
    site = Site(tmp_path / "state", options={"promises": file})
    site.shell.tick()
    assert json.loads(file.read_text())["booked"] == []
    for desired in ("prepared", "running"):
        site.obey(running(desired))
    with full_disk():
        site.shell.tick()
    site.shell.tick()
    booked = Admission.model_validate_json(file.read_bytes()).booked
    assert [one.request.name for one in booked] == ["a.1.west"]
    site.obey(running("released"))
    site.shell.tick()
    assert json.loads(file.read_text())["booked"] == []


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    """The agent goes on without the file; what holds the path is named."""
    from isthmus.agent.network.promised_rates import PromiseFile

    with pytest.raises(UnavailableError, match=r"nowhere.*No such file"):
        PromiseFile(tmp_path / "nowhere" / "promises.json", "east").update([])
