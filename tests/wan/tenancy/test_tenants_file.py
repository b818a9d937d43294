"""The file of tenants: what clashes is said with its line and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from isthmus.core.errors import InputError
from isthmus.wan.tenancy.tenants_file import MAX_TENANTS, TenantsFile
from isthmus.wan.tenants.read_tenants import read_tenants
from tests.wan.tenancy.tenancy_lab import ADDRESSES, tenant


def load(folder: Path, tenants: list[dict[str, Any]], **fields: Any) -> TenantsFile:
    """Return what is read of such a file."""
    file = folder / "tenants.yaml"
    file.write_text(
        yaml.dump({"site": "nanjing", "gateways": ADDRESSES, "gbps": 1, "tenants": tenants, **fields}, sort_keys=False)
    )
    return read_tenants(file)


def test_tenants_may_have_the_same_addresses(tmp_path: Path) -> None:
    """That is what they have VNIs for."""
    assert len(load(tmp_path, [tenant(1), tenant(2)]).tenants) == 2


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"vni": 5001}, "vni 5001 of t2 is that of t1 too", "VNI 5002 is free"),
        ({"vni": 1}, "vni 1 of t2 is that of the gateways' control traffic too", "VNI 2 is free"),
        ({"vlan": 101}, "vlan 101 of t2 is that of t1 too", "VLAN 102 is free"),
        ({"name": "t1"}, "name t1 of t1 is that of t1 too", "each tenant"),
        (
            {"networks": {"nanjing": ["10.0.0.0/8"], "hangzhou": ["10.2.0.0/16"]}},
            "10.2.0.0/16 at hangzhou overlaps 10.0.0.0/8",
            "one site",
        ),
        ({"networks": {"suzhou": ["10.3.0.0/16"]}}, "suzhou has no address under gateways", "add it"),
        ({"gbps": 2}, "tenants and control have 2.0102 Gbit/s", "promise less"),
        ({"max_gbps": 3}, "max_gbps of t2", "ceiling"),
        ({"vni": 2**24}, "less than or equal to 16777215", None),
        ({"vlan": 4095}, "less than or equal to 4094", None),
        ({"port": "a/b"}, "pattern", None),
        ({"allow": []}, "at least 1", None),
        ({"allow": [{"protocol": "udp", "to_ports": "9-4"}]}, "no port or range", None),
        ({"allow": [{"protocol": "icmp", "to_ports": 9}]}, "icmp has no ports", None),
        ({"vxlan": 1}, "unknown field", None),
    ],
)
def test_what_clashes_is_said_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str, hint: str | None
) -> None:
    """Before anything is set; the hint names a number that is free."""
    with pytest.raises(InputError, match=r"tenants.yaml:\d+: ") as caught:
        load(tmp_path, [tenant(1), {**tenant(2), **change}])
    assert message in str(caught.value)
    if hint is not None:
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"site": "suzhou"}, "suzhou has no address under gateways"),
        ({"gateways": {"nanjing": "10.0.0.1", "hangzhou": "10.0.0.1"}}, "10.0.0.1 is that of nanjing too"),
        ({"gateways": {"nanjing": "10.0.0.1"}}, "at least 2"),
        ({"gbps": 0.005}, "the device sends 0.005"),
    ],
)
def test_what_is_wrong_with_gateways_is_said(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """Sites, addresses and the device's rate have to fit."""
    with pytest.raises(InputError) as caught:
        load(tmp_path, [tenant(1)], **fields)
    assert message in str(caught.value)


def test_the_number_of_tenants_is_bounded(tmp_path: Path) -> None:
    """VLANs are 4,094, and a file of a million tenants costs no memory of the gateway."""
    few = {"networks": {"nanjing": ["10.1.0.0/16"]}, "allow": [{"protocol": "icmp"}], "gbps": 1e-6}
    many = [{**tenant(1), **few}] * (MAX_TENANTS + 1)
    with pytest.raises(ValidationError, match="at most 4000"):
        TenantsFile.model_validate({"site": "nanjing", "gateways": ADDRESSES, "gbps": 1, "tenants": many})


def test_json_says_its_line_as_well(tmp_path: Path) -> None:
    """Though a right one is read without lines."""
    file = tmp_path / "tenants.json"
    document = {"site": "nanjing", "gateways": ADDRESSES, "gbps": 1, "tenants": [tenant(1), tenant(2)]}
    file.write_text(json.dumps(document, indent=1))
    assert len(read_tenants(file).tenants) == 2
    file.write_text(json.dumps({**document, "tenants": [tenant(1), tenant(2, vni=5001)]}, indent=1))
    with pytest.raises(InputError, match=r"tenants.json:\d+: tenants\[1\].vni: vni 5001 of t2 is that of t1 too"):
        read_tenants(file)
