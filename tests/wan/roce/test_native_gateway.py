"""The native gateway beside its specification: the same instructions for every event, at every moment."""

from __future__ import annotations

import math
import zlib
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from unittest.mock import Mock

import pytest

from isthmus.core.errors import InputError, UnavailableError
from isthmus.wan.roce.gateway.gateway import Gateway, GatewayStatistics
from isthmus.wan.roce.gateway.gateway_events import (
    GatewayEvent,
    GatewayInstruction,
    LinkDatagram,
    LinkDatagrams,
    NicFrame,
    NicFrames,
    SendOnLink,
    SendToNic,
    Tick,
)
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.native_gateway import native_gateway
from isthmus.wan.roce.nic import PostWork
from scripts.build_native import build_native
from tests.wan.roce import gateway_lab
from tests.wan.roce.test_connections import SETTINGS, connect, set_up
from tests.wan.roce.test_gateway import RandomTraffic, check_numbers_after_a_restart, settings_of


class Twins:
    """Both forms of a gateway; every answer of the two is compared."""

    def __init__(self, native: type[Gateway], settings: GatewaySettings, epoch: int) -> None:
        self.specified, self.native = Gateway(settings, epoch), native(settings, epoch)

    def handle(self, event: GatewayEvent, now_s: float) -> list[GatewayInstruction]:
        expected, found = self.specified.handle(event, now_s), self.native.handle(event, now_s)
        assert [(type(one), one) for one in found] == [(type(one), one) for one in expected], (event, now_s)
        assert self.native.held_bytes == self.specified.held_bytes
        return found

    def next_tick_s(self, now_s: float) -> float:
        found = self.native.next_tick_s(now_s)
        assert found == self.specified.next_tick_s(now_s)
        return found

    def statistics(self) -> GatewayStatistics:
        found = self.native.statistics()
        assert found == self.specified.statistics()
        return found

    @property
    def held_bytes(self) -> int:
        return self.native.held_bytes

    @property
    def num_waiting_bytes(self) -> int:
        assert self.native.num_waiting_bytes == self.specified.num_waiting_bytes
        return self.native.num_waiting_bytes

    @property
    def is_connected(self) -> bool:
        assert self.native.is_connected == self.specified.is_connected
        return self.native.is_connected


@pytest.mark.parametrize("seed", range(12))
def test_both_forms_say_the_same_over_bad_lines(native: type[Gateway], seed: int) -> None:
    """Any loss, repeats, reordering, lossy LANs, wrapped numbers and restarts: equal instructions, event by event."""
    restart = ((), (gateway_lab.NEAR,), (gateway_lab.FAR,), ())[seed % 4]
    traffic = RandomTraffic(seed, acknowledge_near=seed % 3 > 0, lab_fields={"make": partial(Twins, native)})
    traffic.run(restart)
    for gateway in traffic.lab.gateways:
        assert gateway is not None
        gateway.statistics()


def test_both_forms_keep_a_number_given_again_with_its_queue_pair(native: type[Gateway]) -> None:
    """After a restart of the peer, what had the number before ends without it."""
    check_numbers_after_a_restart(partial(Twins, native))


def test_both_forms_learn_queue_pairs_from_messages(native: type[Gateway]) -> None:
    """What REQ and REP name begins at once in both, with near acknowledgements, and again under the same numbers."""
    lab = gateway_lab.GatewayLab(1, settings=SETTINGS, make=partial(Twins, native))
    for number in range(2):
        pair = connect(lab, near_psn=2**24 - 2, far_psn=700 + number)
        set_up(lab, pair, number)
        lab.post(pair[0], PostWork("send", bytes(9_000)))
        lab.run(lab.now_s + 5)
        assert pair[1].arrived == [bytes(9_000)]


def test_both_forms_refuse_what_is_forged(native: type[Gateway]) -> None:
    """Cut, flipped and random frames and datagrams, in runs and alone: equal answers, bounded memory, no crash."""
    rng, settings = Random(7), settings_of(acknowledge_near=True, max_queue_pairs=40, max_flow_bytes=50_000)
    traffic = RandomTraffic(3, acknowledge_near=True)
    known: list[tuple[bool, bytes]] = []
    carry_out = traffic.lab.carry_out

    def keep(site: int, one: GatewayInstruction) -> None:
        if isinstance(one, SendOnLink | SendToNic):
            known.append((isinstance(one, SendOnLink), one[0]))
        carry_out(site, one)

    traffic.lab.carry_out = keep  # type: ignore[method-assign]
    traffic.run()
    gateway, now_s = Twins(native, settings, 5), 0.0
    for number in range(6_000):
        now_s += rng.choice((0.0, 1e-5, 1e-3, 0.2))
        is_link, data = rng.choice(known)
        changed = bytearray(data if rng.random() < 0.9 else rng.randbytes(rng.randrange(80)))
        for _ in range(rng.choice((0, 0, 1, 3)) if changed else 0):
            changed[rng.randrange(min(len(changed), rng.choice((24, 60, 9_000))))] = rng.randrange(256)
        one = bytes(changed[: rng.choice((len(changed), len(changed), rng.randrange(len(changed) + 1)))])
        if is_link and len(one) >= 12 and rng.random() < 0.9:  # to the epochs that these gateways have
            one = one[:4] + (9).to_bytes(4, "big") + (5).to_bytes(4, "big") + one[12:]
        run: list[GatewayEvent] = [LinkDatagram(one), LinkDatagrams([one, data])] if is_link else []
        gateway.handle(rng.choice([*run, NicFrame(one), NicFrames([one, data]), Tick()]), now_s)
        assert gateway.held_bytes <= 2 * settings.max_total_bytes
        if number % 500 == 0:
            gateway.next_tick_s(now_s)
            gateway.statistics()
    assert gateway.is_connected


def test_the_checksum_is_that_of_zlib(native_module: ModuleType) -> None:
    """Every length to 300 and some longer ones, whatever the processor can do."""
    crc32 = native_module.crc32
    rng = Random(1)
    for size in (*range(300), 1_068, 4_096, 9_216):
        data = rng.randbytes(size)
        assert crc32(data) == zlib.crc32(data)


def test_what_is_no_event_is_refused(native: type[Gateway]) -> None:
    """Epochs out of range, frames that are no bytes, and other calls raise; nothing is read beyond its end."""
    with pytest.raises(InputError, match="epoch"):
        native(settings_of(), 0)
    gateway = native(settings_of(), 1)
    with pytest.raises(TypeError, match="bytes"):
        gateway.handle(NicFrames(["text"]), 0.0)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        gateway.handle(Tick())  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        gateway.handle(NicFrame(bytearray(80)), "now")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bytes"):  # and none is taken of a run with a wrong one
        gateway.handle(NicFrames([b"", "text"]), 0.0)  # type: ignore[list-item]
    assert gateway.statistics().frames_refused == 0
    assert gateway.handle(NicFrame(b""), 0.0)[1:] == []
    assert gateway.statistics().frames_refused == 1
    Twins(native, settings_of(), 1).handle(Tick(), math.inf)


def test_a_module_of_other_sources_is_refused(native_module: ModuleType, tmp_path: Path) -> None:
    """It would be another state machine than Python's; without sources beside it, it is taken."""
    with pytest.raises(UnavailableError, match="other sources") as error:
        native_gateway(lambda: native_module, tmp_path)
    assert "make native" in (error.value.hint or "")
    assert native_gateway(lambda: native_module, tmp_path / "absent") is native_module.NativeGateway


def test_a_module_that_cannot_be_loaded_is_told() -> None:
    """Only one that is not there means Python's form."""
    assert native_gateway(Mock(side_effect=ModuleNotFoundError("No module"))) is None
    with pytest.raises(UnavailableError, match="undefined symbol"):
        native_gateway(Mock(side_effect=ImportError("undefined symbol")))


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The compiler's half of a module is removed."""
    compile_half = "while [ $# -gt 1 ]; do shift; done; echo half > $1; exit 1"
    with pytest.raises(SystemExit, match="status 1"):
        build_native(tmp_path, ["sh", "-c", compile_half, "sh"])
    assert list(tmp_path.iterdir()) == []
