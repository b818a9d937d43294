"""Rules of the leg by RDMA over libibverbs: its ABI is the header's, and the kit passes, on a card or without."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

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


@contextmanager
def stated(library: str, name: str) -> Iterator[None]:
    """State `name` of the stand-in meanwhile."""
    flag = ctypes.c_int.in_dll(ctypes.CDLL(library), f"stand_in_{name}")
    flag.value = 1
    try:
        yield
    finally:
        flag.value = 0


def tell_gids(folder: Path, *entries: tuple[str, str]) -> Path:
    """Write the GIDs of the card's port, each a kind and an address, as the kernel tells them in `folder`."""
    for number, entry in enumerate(entries):
        for place, text in zip(("gid_attrs/types", "gids"), entry, strict=True):
            (file := folder / "stand_in0/ports/1" / place / str(number)).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize("sites", ["", "abb"])
def test_transports_conform_over_the_library(stand_in: str, tmp_path: Path, sites: str) -> None:
    """All calls of a card's life, with the masks, keys, bounds and states that a card checks, serve the whole kit."""
    card = open_card("stand_in0", library=stand_in, sysfs=tell_gids(tmp_path, (V2, IPV4)))
    use_device("stand-in", card)
    check_joined_transport(partial(transports, sites=sites, rdma=lambda _: "stand-in"))


def test_a_card_whose_port_is_down_is_named(stand_in: str) -> None:
    """The error has its name and why it is of no use."""
    with stated(stand_in, "port_is_down"), pytest.raises(InputError, match=r"stand_in0 \(its port is not active\)"):
        open_card(library=stand_in)


def test_a_card_goes_by_its_gid_of_an_ip_address(stand_in: str, tmp_path: Path) -> None:
    """Of RoCE v2, over IPv4 if there is one."""
    card = open_card(library=stand_in, sysfs=tell_gids(tmp_path, (V1, IPV6), (V2, IPV6), (V1, IPV4), (V2, IPV4)))
    card.close()
    assert card.gid_index == 3


@pytest.mark.parametrize("entries", [(), ((V1, IPV6),)])
def test_a_card_without_an_ip_address_is_refused(
    stand_in: str, tmp_path: Path, entries: tuple[tuple[str, str], ...]
) -> None:
    """A GID of RoCE v1 is of no use, nor is one that is not there; the error has card, port and what to do."""
    with pytest.raises(InputError, match=r"stand_in0 \(its port 1 has no GID of RoCE v2: give .* an IP address\)"):
        open_card(library=stand_in, sysfs=tell_gids(tmp_path, *entries))


def test_a_card_of_infiniband_goes_by_its_first_gid(stand_in: str, tmp_path: Path) -> None:
    """It has one whatever addresses there are."""
    with stated(stand_in, "link_is_infiniband"):
        card = open_card(library=stand_in, sysfs=tmp_path)
    card.close()
    assert card.gid_index == 0


def test_transports_conform_over_a_card() -> None:
    """The same kit over the first card of this machine."""
    try:
        use_device("card", open_card())
    except InputError as error:
        pytest.skip(error.message)
    check_joined_transport(partial(transports, sites="abb", rdma=lambda _: "card"))
