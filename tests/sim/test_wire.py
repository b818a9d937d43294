"""Rules of wires: rate, delay, sharing, jitter and interference."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.core.pool import Link
from isthmus.sim.kernel import Kernel
from isthmus.sim.links.link_queue import LINK_QUEUES
from isthmus.sim.links.simulated_link import Interference, SimulatedLink, send_end_s, simulated_link, transferable_bytes

sizes = st.floats(1, 1e4)
interferences = st.builds(
    Interference,
    bytes_per_s=st.floats(0, 1500),
    start_s=st.floats(0, 5),
    on_s=st.floats(0.01, 5),
    off_s=st.floats(0.01, 5),
)


@dataclass
class Parcel:
    num_bytes: float
    weight: int = 1
    flow: int = 0
    left_s: float = -1.0
    arrives_s: float = -1.0

    def on_sent(self, left_s, arrives_s):
        assert self.left_s < 0
        self.left_s, self.arrives_s = left_s, arrives_s


def wire(**more):
    return SimulatedLink(**{"name": "w", "bytes_per_s": 1000.0, "delay_s": 0.5, **more})


def carry(parcels, sharing="fifo", seed=0, **more):
    """Hand over (time, parcel) pairs and run; return the carrier."""
    kernel = Kernel()
    carrier = LINK_QUEUES[sharing](kernel, wire(**more), seed)
    for at_s, parcel in parcels:
        kernel.call_at(at_s, lambda _, parcel=parcel: carrier.send(parcel))
    kernel.run()
    return carrier


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
def test_one_message_takes_transfer_and_delay(sharing):
    """Bytes over rate until it has left, the delay more until it has arrived."""
    parcel = Parcel(2000)
    assert carry([(1.0, parcel)], sharing).sent_bytes == 2000
    assert (parcel.left_s, parcel.arrives_s) == (3.0, 3.5)


def test_fifo_is_one_after_the_other_and_fair_is_all_at_once():
    """Two equal messages: 1 s and 2 s in a row, 2 s both when shared; a short one overtakes only there."""
    a, b = Parcel(1000), Parcel(1000)
    carry([(0.0, a), (0.0, b)], "fifo")
    assert (a.left_s, b.left_s) == (1.0, 2.0)
    a, b = Parcel(1000), Parcel(1000)
    carry([(0.0, a), (0.0, b)], "fair")
    assert (a.left_s, b.left_s) == (2.0, 2.0)
    long, short = Parcel(3000), Parcel(500)
    carry([(0.0, long), (1.0, short)], "fair")
    assert (short.left_s, long.left_s) == (2.0, 3.5)


@given(st.lists(st.tuples(st.floats(0, 10), sizes), min_size=1, max_size=12), st.sampled_from(["fifo", "fair"]))
def test_a_wire_never_idles_and_never_hurries(jobs, sharing):
    """The last message leaves when a single server would have finished all: both kinds conserve work."""
    parcels = [(at_s, Parcel(size)) for at_s, size in jobs]
    carry(parcels, sharing)
    free_s = 0.0
    for at_s, parcel in sorted(parcels, key=lambda pair: pair[0]):
        free_s = max(free_s, at_s) + parcel.num_bytes / 1000
        assert parcel.left_s >= at_s + parcel.num_bytes / 1000 - 1e-9
    assert abs(max(p.left_s for _, p in parcels) - free_s) < 1e-6


@given(st.lists(st.tuples(st.floats(0, 5), sizes), min_size=1, max_size=6), st.integers(1, 5))
def test_a_weighted_parcel_is_that_many_equal_ones(jobs, weight):
    """Fair sharing: one parcel of weight w leaves exactly when each of w equal parcels would."""
    folded = [(at_s, Parcel(size, weight if i == 0 else 1)) for i, (at_s, size) in enumerate(jobs)]
    apart = [(at_s, Parcel(size)) for i, (at_s, size) in enumerate(jobs) for _ in range(weight if i == 0 else 1)]
    one, many = carry(folded, "fair"), carry(apart, "fair")
    for (_, parcel), (_, twin) in zip(folded, [apart[0], *apart[weight:]], strict=True):
        assert abs(parcel.left_s - twin.left_s) < 1e-6
    assert abs(one.sent_bytes - many.sent_bytes) < 1e-6


@given(interferences, st.floats(0, 20), st.floats(0, 2e4))
def test_interference_takes_exactly_its_bytes(interference, start_s, size):
    """What can be moved from a start to the computed finish is the message, whatever others do."""
    w = wire(interference=interference)
    end_s = send_end_s(w, start_s, size)
    assert end_s >= start_s + size / 1000 - 1e-9
    assert abs(transferable_bytes(w, start_s, end_s) - size) < 1e-6 * max(1.0, size)


def test_interference_by_hand():
    """600 of 1000 bytes/s are taken in the first second of every two."""
    w = wire(interference=Interference(bytes_per_s=600, on_s=1, off_s=1))
    assert send_end_s(w, 0.0, 400) == 1.0
    assert send_end_s(w, 0.0, 1400) == 2.0
    assert abs(send_end_s(w, 0.0, 2 * 1400 + 200) - 4.5) < 1e-12
    constant = wire(interference=Interference(bytes_per_s=600, start_s=1.0))
    assert abs(send_end_s(constant, 0.0, 1400) - 2.0) < 1e-12


@given(st.integers(0, 99), st.sampled_from(["fifo", "fair"]))
def test_jitter_depends_on_the_seed_alone_and_keeps_a_flow_in_order(seed, sharing):
    """The same seed gives the same arrivals; messages of a flow never overtake each other."""
    runs = []
    for _ in range(2):
        parcels = [(0.1 * i, Parcel(50)) for i in range(20)]
        carry(parcels, sharing, seed, jitter_s=0.3)
        runs.append([parcel.arrives_s for _, parcel in parcels])
    assert runs[0] == runs[1]
    assert runs[0] == sorted(runs[0])
    assert all(p.arrives_s >= p.left_s for _, p in parcels)


def test_a_link_of_the_pool_becomes_a_wire():
    """Loss is the rate it costs; delay and jitter are the link's."""
    fields = {"from": "a", "to": "b", "bandwidth_gbps": 1, "delay_ms": 10, "jitter_ms": 2}
    clean, lossy = (simulated_link(Link(**fields, loss=p, congestion_control="cubic")) for p in (0.0, 0.01))
    assert (clean.name, clean.delay_s, clean.jitter_s) == ("a>b", 0.01, 0.002)
    assert lossy.bytes_per_s < clean.bytes_per_s <= 1e9 / 8


@pytest.mark.parametrize(
    "more",
    [
        {"bytes_per_s": 0.0},
        {"delay_s": -1.0},
        {"interference": Interference(bytes_per_s=1000)},
    ],
)
def test_impossible_wires_are_refused(more):
    """No rate, negative delay, or interference that never leaves any of the rate."""
    with pytest.raises(InputError):
        wire(**more)
    with pytest.raises(InputError):
        Interference(bytes_per_s=1, on_s=0)
