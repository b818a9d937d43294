"""`run_client`: one sum of a `SwitchClient` over a UDP socket."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from isthmus.core.messages.datagram import Address, Datagram
from isthmus.switch.switch_client import Abort, ClientState, Instructions, Received, Start, SwitchClient, Timer
from isthmus.wan import UdpSocket


def run_client(
    client: SwitchClient,
    start: Start,
    udp: UdpSocket,
    switch: Address,
    clock: Callable[[], float],
    timeout_s: float,
) -> ClientState:
    """Run one sum at `switch` to its end and return DONE or FAILED; packets of other senders are dropped.

    A sum that is not done within `timeout_s` of `clock()` fails.
    """

    def act(made: Instructions) -> float | None:
        for data, size in made.send:
            udp.send(Datagram(switch, data, size))
        return made.wake_s

    with selectors.DefaultSelector() as selector:
        selector.register(udp.fileno(), selectors.EVENT_READ)
        wake_s = act(client.handle(start, clock()))
        end_s = clock() + timeout_s
        while wake_s is not None:
            if clock() >= end_s:
                client.handle(Abort(f"workers {client.pending_workers()} sent nothing within {timeout_s:g} s"), clock())
                break
            if selector.select(max(min(wake_s, end_s) - clock(), 0.0)):
                for datagram in udp.receive():
                    if datagram.address == switch:
                        wake_s = act(client.handle(Received(datagram.data, datagram.packet_bytes), clock()))
            else:
                wake_s = act(client.handle(Timer(), clock()))
    return client.state
