"""`access` and `crossing` in `pool.yaml`: what is refused, where, and what is chosen and started."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus.core.errors import FileError, InputError
from isthmus.core.files.user_files import load_pool
from isthmus.core.pool import Pool
from isthmus.wan.control.choose_transport import roce_payload_bytes
from isthmus.wan.crossing.choose_crossing import choose_crossing
from isthmus.wan.crossing.plan_site import plan_site

GROUP = [{"chip": "H20", "nodes": 1, "chips_per_node": 1}]


def gateway(name: str, host: str, network: str, **more: Any) -> dict[str, Any]:
    """Return a gateway of `pool.yaml`."""
    return {"name": name, "listen": f"{host}:4790", "networks": [network], "roce_gbps": 0.4, **more}


def document(**crossing: Any) -> dict[str, Any]:
    """Return a pool of two sites with two gateways each, whose link has `crossing`."""
    sites = (("nanjing", "10.0.0.1", "10.1.0.0/24"), ("hangzhou", "10.0.0.2", "10.2.0.0/24"))
    return {
        "clusters": [
            {
                "name": name,
                "owner": name,
                "node_groups": GROUP,
                "access": {
                    "proxy": {"listen": f"{host}:7400"},
                    "gateways": [
                        gateway("g1", host, network),
                        {**gateway("g2", host, network), "listen": f"{host}:4791"},
                    ],
                },
            }
            for name, host, network in sites
        ],
        "links": [
            {
                "between": ["nanjing", "hangzhou"], "bandwidth_gbps": 1, "round_trip_ms": 40,
                "crossing": {"key": "link.key", **crossing},
            }
        ],
    }  # fmt: skip


def changed(place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return `document` with another value at a place; None removes it."""
    found = copy.deepcopy(document(transport="roce"))
    at: Any = found
    for step in place[:-1]:
        at = at[step]
    if value is None:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return found


ACCESS = ("clusters", 1, "access")
WRONG = [
    (ACCESS, None, "links[0].crossing", "no `access`", "state `access"),
    ((*ACCESS, "gateways"), [], "links[0].crossing.transport", "no gateways of the same name", "state `gateways`"),
    (
        (*ACCESS, "gateways", 0, "networks"),
        ["10.1.0.0/16"],
        "clusters[1].access.gateways[0].networks",
        "overlaps",
        "each network belongs to one site",
    ),
    ((*ACCESS, "gateways", 1, "name"), "g1", "clusters[1].access.gateways[1].name", "two gateways", None),
    ((*ACCESS, "gateways", 1, "device"), "roce0", "clusters[1].access.gateways[1]", "a device", "for all, or for none"),
    ((*ACCESS, "proxy", "listen"), "10.0.0.2", "clusters[1].access.proxy.listen", "an address and a port", None),
    ((*ACCESS, "proxy", "allow"), ["10.0.0.9/8"], "clusters[1].access.proxy.allow[0]", "no network", None),
    (("links", 0, "crossing", "streams"), 17, "links[0].crossing.streams", "16", None),
    (("links", 0, "crossing", "transport"), "quic", "links[0].crossing.transport", "roce", None),
    (
        ("links", 0, "crossing", "error_correction"),
        True,
        "links[0].crossing.error_correction",
        "roce has no",
        None,
    ),
    (("links", 0, "crossing", "kye"), "x", "links[0].crossing.kye", "unknown field", "did you mean 'key'?"),
    (("links", 0, "crossing", "key"), None, "links[0].crossing.key", "is missing", None),
]


@pytest.mark.parametrize(("place", "value", "field", "message", "hint"), WRONG)
def test_what_contradicts_itself_is_refused_at_its_line(
    tmp_path: Path, place: tuple[str | int, ...], value: Any, field: str, message: str, hint: str | None
) -> None:
    """A crossing that its sites cannot have is refused with line, field and hint, before anything starts."""
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(changed(place, value)))
    with pytest.raises(FileError) as refused:
        load_pool(file)
    assert refused.value.field == field
    assert refused.value.line is not None
    assert message in str(refused.value)
    assert hint is None or hint in str(refused.value)


def test_no_site_that_is_dialled_is_refused(tmp_path: Path) -> None:
    """At least one of two sites has a proxy that listens."""
    found = document()
    for cluster in found["clusters"]:
        del cluster["access"]["proxy"]
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(found))
    with pytest.raises(FileError, match="no proxy has `listen`"):
        load_pool(file)


@pytest.mark.parametrize(
    ("change", "legs"), [({}, "tcp"), ({"transport": "datagram"}, "datagram"), ({"transport": "roce"}, "roce")]
)
def test_the_transport_and_its_rates_follow_from_the_pool(change: dict[str, Any], legs: str) -> None:
    """n / a at the gateway and n / (a b) at the edge; never more at the edge than the link has."""
    pool = Pool.model_validate(document(**change))
    chosen = choose_crossing(pool, "nanjing", "hangzhou")
    assert chosen.legs == legs
    choice = chosen.choice
    assert choice.goodput_gbps <= choice.gateway_gbps <= choice.edge_gbps <= 1.0 + 1e-9
    assert choose_crossing(pool, "hangzhou", "nanjing").choice.edge_gbps == choice.edge_gbps


def test_auto_takes_queue_pairs_where_gateways_carry_more() -> None:
    """The transport follows what proxies and gateways say that they carry."""
    found = document()
    for cluster in found["clusters"]:
        cluster["access"]["proxy"]["tcp_gbps"] = 0.5
    assert choose_crossing(Pool.model_validate(found), "nanjing", "hangzhou").legs == "roce"


def test_a_site_starts_what_its_links_need(tmp_path: Path) -> None:
    """Queue pairs have both gateways with half of the rate each; TCP has a proxy alone; one side dials a gateway."""
    ports = iter(range(20_000, 20_100))
    pool = Pool.model_validate(document(transport="roce"))
    plans = {one: plan_site(pool, one, tmp_path, lambda _: next(ports)) for one in ("nanjing", "hangzhou")}
    near, far = plans["nanjing"], plans["hangzhou"]
    assert [one.name for one in near.gateways] == ["g1", "g2"]
    total = near.choices[0].choice.gateway_gbps
    assert sum(one.sites["hangzhou"].gbps for one in near.gateways) == pytest.approx(total)
    assert [one.sites["hangzhou"].dial for one in near.gateways] == ["10.0.0.2:4790", "10.0.0.2:4791"]
    assert all(one.sites["nanjing"].dial is None for one in far.gateways)
    assert near.proxy is not None
    assert far.proxy is not None
    assert near.proxy.sites["hangzhou"].far_nic == far.proxy.nic == "10.2.0.1"
    assert near.proxy.sites["hangzhou"].silence_s == far.proxy.sites["nanjing"].silence_s < 1
    assert near.routes() == {"hangzhou": f"127.0.0.1:{near.proxy.sites['hangzhou'].worker_port}"}
    tcp = plan_site(Pool.model_validate(document(transport="tcp")), "nanjing", tmp_path, lambda _: next(ports))
    assert tcp.gateways == ()
    assert tcp.proxy is not None
    assert tcp.proxy.sites["hangzhou"].key == str(tmp_path / "link.key")


def test_the_edge_shapes_each_crossing_at_its_rate(tmp_path: Path) -> None:
    """The edge has a class of n / (a b) for the packets of each crossing, both of dialled and of accepted legs."""
    found = document(transport="tcp", required_gbps=0.5)
    found["clusters"][0]["access"]["edge"] = {"device": "eth0", "gbps": 2}
    plan = plan_site(Pool.model_validate(found), "nanjing", tmp_path, lambda _: 20_000)
    assert plan.edge is not None
    rates = {one.name: one.rate_kbps for one in plan.edge.classes}
    assert rates["crossing-hangzhou"] == pytest.approx(plan.choices[0].choice.edge_gbps * 1e6, abs=1)
    assert len(plan.edge.filters) == 2
    found["clusters"][0]["access"]["edge"]["gbps"] = 0.5
    with pytest.raises(InputError, match="promised"):
        plan_site(Pool.model_validate(found), "nanjing", tmp_path, lambda _: 20_000)


@pytest.mark.parametrize(("mtu", "payload"), [(9000, 4096), (1500, 1024), (576, 256)])
def test_packets_fit_the_mtu(mtu: int, payload: int) -> None:
    """A RoCE packet in the datagram between gateways is no longer than the link's MTU."""
    assert roce_payload_bytes(mtu) == payload
