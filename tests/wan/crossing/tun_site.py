"""A site in a network namespace: what `pool.yaml` starts for it, and a NIC in user space behind a TUN device.

`python -m tests.wan.crossing.tun_site FOLDER SITE OWN PEER QUEUE_PAIR PEER_QUEUE_PAIR COUNT`: sends COUNT messages,
takes as many, and prints what came as JSON.
"""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path

from pyroute2 import IPRoute

from isthmus.core.pool import Pool
from isthmus.wan.crossing.crossing_processes import site_crossings
from isthmus.wan.gateway.nic_port import TunNics
from isthmus.wan.roce.nic import MessageArrived, NicArrival, NicSettings, NicTick, PostWork, RoceNic, Transmit, WorkDone

LIMIT_S = 40.0
LINGER_S = 1.0
DEVICE = "nic0"


def main() -> None:
    """Run the site until all messages are through, and a little longer for the other one's sake."""
    folder, site, own, peer = Path(sys.argv[1]), *sys.argv[2:5]
    queue_pair, peer_queue_pair, count = map(int, sys.argv[5:8])
    pool = Pool.model_validate_json((folder / "pool.json").read_bytes())
    device = TunNics(DEVICE)
    with IPRoute() as route:
        index = route.link_lookup(ifname=DEVICE)[0]
        route.link("set", index=index, state="up")
        route.route("replace", dst=f"{own}/32", oif=index)
    crossings = site_crossings(pool, site, folder, folder / site, {}, None)
    assert crossings is not None
    nic = RoceNic(
        NicSettings(
            address=own, peer=peer, queue_pair=queue_pair, peer_queue_pair=peer_queue_pair, port_gbps=0.1,
            resend_s=0.3, max_retries=1000,
        )
    )  # fmt: skip
    arrived: list[bytes] = []
    done = 0
    with crossings:
        end_s = time.monotonic() + LIMIT_S
        events: list[PostWork | NicArrival | NicTick] = [
            PostWork("send", bytes([number]) * 3000) for number in range(count)
        ]
        while (now_s := time.monotonic()) < end_s:
            for event in events or [NicTick()]:
                for one in nic.handle(event, now_s):
                    if isinstance(one, Transmit):
                        device.write(one.frame, b"")
                    elif isinstance(one, MessageArrived):
                        arrived.append(one.data)
                    done += isinstance(one, WorkDone)
            events = []
            if done == count == len(arrived):
                end_s = min(end_s, now_s + LINGER_S)
            wait_s = min(max(0.0, nic.next_tick_s() - now_s), 0.05)
            select.select([device], [], [], wait_s)
            while (frame := device.read()) is not None:
                events.append(NicArrival(frame))
    good = arrived == [bytes([number]) * 3000 for number in range(count)]
    print(json.dumps({"done": done, "arrived": len(arrived), "is_good": good, "failed": nic.failed}))


if __name__ == "__main__":
    main()
