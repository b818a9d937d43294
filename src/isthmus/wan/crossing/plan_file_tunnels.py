"""`plan_file_tunnels`: the tunnels that a file of the network asks for, one request for each edge node."""

from __future__ import annotations

from isthmus.core.errors import InputError
from isthmus.wan.control.wan_topology import AdmissionFile, Booking, TransferBooking
from isthmus.wan.controller.book_stated import book_stated
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.wan_network import WanNetwork
from isthmus.wan.crossing.plan_tunnels import TunnelPlan, plan_tunnels


def plan_file_tunnels(file: AdmissionFile) -> TunnelPlan:
    """Return the tunnels for the requests of `file` beside what it states as booked.

    Raises `InputError` for transfers, which have no tunnels, and for bookings on pipes that are down.
    """
    if file.transfers:
        raise InputError(
            f"{file.transfers[0].name} is a transfer, which has no tunnel",
            hint="`isthmus wan admit` plans transfers; leave them out here",
        )
    network = WanNetwork(file.topology)
    for name in file.down:
        network.pipe(name)
    bookings = PipeBookings(network.pipes, file.topology.bulk_share)
    bookings.down.update(file.down)
    booked: list[Booking | TransferBooking] = [*file.booked, *file.booked_transfers]
    for booking in booked:
        if booking.request.name in bookings:
            raise InputError(f"{booking.request.name} is booked twice", hint="give each booking a name of its own")
        if broken := bookings.down.intersection(booking.pipes):
            raise InputError(
                f"{booking.request.name} is booked on {min(broken)}, which is down",
                hint="`isthmus wan admit` moves it; state its answer's bookings",
            )
        book_stated(network, bookings, booking)
    return plan_tunnels(network, bookings, file.requests)
