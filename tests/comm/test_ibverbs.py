"""Rules of the leg by RDMA over libibverbs: its ABI is the header's, and the kit passes, on a card or without."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from isthmus.comm.rdma import ibverbs_device
from isthmus.comm.rdma import ibverbs_library as abi
from isthmus.comm.rdma.ibverbs_device import open_card
from isthmus.comm.rdma.open_device import use_device
from isthmus.comm.transport.check_transport import check_joined_transport
from isthmus.core.errors import InputError
from tests.comm.ranks import transports

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
LAYOUTS: dict[str, tuple[type[ctypes.Structure], dict[str, str]]] = {
    "ibv_context": (abi.Context, {}),
    "ibv_comp_channel": (abi.CompletionChannel, {}),
    "ibv_mr": (abi.MemoryRegion, {}),
    "ibv_qp": (abi.QueuePair, {}),
    "ibv_qp_cap": (abi.QueuePairCapacity, {}),
    "ibv_qp_init_attr": (abi.QueuePairSetup, {}),
    "ibv_ah_attr": (
        abi.AddressHandle,
        {name: f"grh.{name}" for name in ("dgid", "flow_label", "sgid_index", "hop_limit", "traffic_class")},
    ),
    "ibv_qp_attr": (abi.QueuePairChange, {}),
    "ibv_port_attr": (abi.PortState, {}),
    "ibv_sge": (abi.Segment, {}),
    "ibv_send_wr": (abi.SendWork, {"remote_addr": "wr.rdma.remote_addr", "rkey": "wr.rdma.rkey"}),
    "ibv_recv_wr": (abi.ReceiveWork, {}),
    "ibv_wc": (abi.WorkCompletion, {}),
}
V1, V2 = "IB/RoCE v1", "RoCE v2"
IPV4, IPV6 = "0000:0000:0000:0000:0000:ffff:0a00:0001", "fe80:0000:0000:0000:0000:00ff:fe00:0001"
PARTIAL = {"ibv_context", "ibv_qp", "ibv_port_attr"}
"""Structures of which only the beginning is used, or that have room for more."""


@pytest.fixture(scope="module")
def compiler() -> str:
    """Return a C compiler that has the header."""
    cc = shutil.which("cc")
    if (
        cc is None
        or subprocess.run(
            [cc, "-E", "-xc", "-"], input=b"#include <infiniband/verbs.h>", capture_output=True
        ).returncode
    ):
        pytest.skip("infiniband/verbs.h (libibverbs-dev) or a C compiler is not installed")
    return cc


@pytest.fixture(scope="module")
def stand_in(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the path of a libibverbs with one card whose queue pairs are those of this process."""
    library = tmp_path_factory.mktemp("verbs") / "libibverbs-stand-in.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", library, HERE / "verbs_stand_in.c"], check=True)
    return str(library)


def test_structures_are_those_of_the_header(compiler: str, tmp_path: Path) -> None:
    """Each field is where the header has it, what is allocated here is as long, and the table's places are right."""
    lines, wanted = list[str](), list[int]()
    for name, (layout, places) in LAYOUTS.items():
        for field, place in vars(layout).items():
            if not field.startswith("_"):
                lines.append(f"offsetof(struct {name}, {places.get(field, field)})")
                wanted.append(place.offset)
        if name not in PARTIAL:
            lines.append(f"sizeof(struct {name})")
            wanted.append(ctypes.sizeof(layout))
    for operation in ("POLL_CQ", "REQ_NOTIFY_CQ", "POST_SEND", "POST_RECV"):
        lines.append(f"offsetof(struct ibv_context_ops, {operation.lower()}) / sizeof(void *)")
        wanted.append(getattr(abi, operation))
    lines.append("sizeof(struct ibv_context_ops) / sizeof(void *)")
    wanted.append(abi.NUM_OPERATIONS)
    body = "".join(f'printf("%zu\\n", (size_t)({line}));' for line in lines)
    source = tmp_path / "layout.c"
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main() {{{body}}}")
    subprocess.run([compiler, "-o", tmp_path / "layout", source], check=True)
    found = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(lines, map(int, found), strict=True)) == dict(zip(lines, wanted, strict=True))


@pytest.fixture
def gids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what writes the GIDs of the card's port, each a kind and an address, where the kernel tells them."""
    monkeypatch.setattr(ibverbs_device, "_SYSFS", tmp_path)
    port = tmp_path / "stand_in0" / "ports" / "1"

    def write(*entries: tuple[str, str]) -> None:
        for number, entry in enumerate(entries):
            for folder, text in zip(("gid_attrs/types", "gids"), entry, strict=True):
                (port / folder).mkdir(parents=True, exist_ok=True)
                (port / folder / str(number)).write_text(f"{text}\n")

    return write


@pytest.mark.parametrize("sites", ["", "abb"])
def test_transports_conform_over_the_library(stand_in: str, gids: Callable[..., None], sites: str) -> None:
    """All calls of a card's life, with the masks, keys, bounds and states that a card checks, serve the whole kit."""
    gids((V2, IPV4))
    use_device("stand-in", open_card("stand_in0", library=stand_in))
    check_joined_transport(partial(transports, sites=sites, rdma=lambda _: "stand-in"))


def test_a_card_whose_port_is_down_is_named(stand_in: str) -> None:
    """The error has its name and why it is of no use."""
    is_down = ctypes.c_int.in_dll(ctypes.CDLL(stand_in), "stand_in_port_is_down")
    is_down.value = 1
    try:
        with pytest.raises(InputError, match=r"stand_in0 \(its port is not active\)"):
            open_card(library=stand_in)
    finally:
        is_down.value = 0


def test_a_card_goes_by_its_gid_of_an_ip_address(stand_in: str, gids: Callable[..., None]) -> None:
    """Of RoCE v2, over IPv4 if there is one."""
    gids((V1, IPV6), (V2, IPV6), (V1, IPV4), (V2, IPV4))
    card = open_card(library=stand_in)
    card.close()
    assert card.gid_index == 3


def test_a_card_without_an_ip_address_is_refused(stand_in: str, gids: Callable[..., None]) -> None:
    """A GID of RoCE v1 is of no use, nor is one that is not there; the error has card, port and what to do."""
    for entries in ((), ((V1, IPV6),)):
        gids(*entries)
        with pytest.raises(InputError, match=r"stand_in0 \(its port 1 has no GID of RoCE v2: give .* an IP address\)"):
            open_card(library=stand_in)


def test_a_card_of_infiniband_goes_by_its_first_gid() -> None:
    """It has one whatever addresses there are."""
    assert ibverbs_device._gid_index("no-such", is_ethernet=False) == 0


def test_transports_conform_over_a_card() -> None:
    """The same kit over the first card of this machine."""
    try:
        use_device("card", open_card())
    except InputError as error:
        pytest.skip(error.message)
    check_joined_transport(partial(transports, sites="abb", rdma=lambda _: "card"))
