"""`pick_gateway`: which gateway carries a queue pair: never finer than a five-tuple, both directions the same.

Source: the report on cross-domain pooling, 4.2.5. A queue pair has one five-tuple; a finer division reorders its
packets, and near acknowledgements need both directions at one gateway. Linux derives the UDP source port of RoCE from
both queue-pair numbers symmetrically, so the sorted pair of addresses and that port name both directions. The weights
are those of rendezvous hashing: D. Thaler, C. Ravishankar, "Using Name-Based Mappings to Increase Hit Rates",
IEEE/ACM Transactions on Networking 6(1), 1998; weighted as in C. Schindelhauer, G. Schomaker, SPAA 2005. Hashing alone
scatters shares binomially; bounds on what each carries are those of V. Mirrokni, M. Thorup, M. Zadimoghaddam,
"Consistent Hashing with Bounded Loads", SODA 2018, here without slack.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections.abc import Mapping

from isthmus.core.errors import InputError, UnavailableError
from isthmus.wan.control.choose_transport import RoceFlow


def pick_gateway(flow: RoceFlow, weights: Mapping[str, float], num_carried: Mapping[str, int] | None = None) -> str:
    """Return the gateway of `flow`; each gets queue pairs in proportion to its weight.

    A caller that keeps the choice for a queue pair's life passes how many each carries, `num_carried`: those that
    have their share are passed over, so that each is within as many queue pairs of its share as there are gateways.
    Without it the choice is of flow and weights alone, the same wherever it is made. When a gateway fails (weight 0, or
    left out) only its own queue pairs move. Raises `UnavailableError` if none has a weight, `InputError` for a weight
    that is negative or infinite.
    """
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise InputError(f"the weight of gateway {name} is {weight}", hint="a number from 0 on; 0 takes no flows")
    usable = {name: weight for name, weight in weights.items() if weight > 0}
    if not usable:
        raise UnavailableError("no gateway takes flows", hint="give one a weight above 0")
    if num_carried is not None:
        num_flows = 1 + sum(num_carried.get(name, 0) for name in usable)
        total = sum(usable.values())
        usable = {
            name: weight for name, weight in usable.items() if num_carried.get(name, 0) * total < weight * num_flows
        } or usable  # sums of floating-point numbers may leave none
    ends = sorted(ipaddress.ip_address(end).packed for end in (flow.source, flow.target))
    key = ends[0] + ends[1] + flow.source_port.to_bytes(2, "big")

    def score(name: str) -> tuple[float, str]:
        digest = hashlib.blake2b(key + name.encode(), digest_size=8).digest()
        share = (int.from_bytes(digest, "big") + 0.5) / 2**64
        return -usable[name] / math.log(share), name

    return max(usable, key=score)
