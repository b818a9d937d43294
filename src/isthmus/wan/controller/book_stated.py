"""`book_stated`: book what a file of the network states as booked."""

from __future__ import annotations

from isthmus.core.errors import InputError
from isthmus.wan.control.wan_topology import Booking, TransferBooking
from isthmus.wan.controller.pipe_bookings import PipeBookings, PipeSpan
from isthmus.wan.controller.wan_network import KBPS_PER_GBPS, WanNetwork, whole_kbps


def book_stated(network: WanNetwork, bookings: PipeBookings, booking: Booking | TransferBooking) -> None:
    """Book `booking` by its name. Raises `InputError` if it does not fit its pipes."""
    for name in booking.pipes:
        network.pipe(name)
    if isinstance(booking, Booking):
        request, service = booking.request, booking.request.service
        if len(booking.rates_gbps) != len(booking.pipes):
            found = f"{len(booking.rates_gbps)} rates for {len(booking.pipes)} pipes"
            raise InputError(f"{request.name} is booked with {found}", hint="state a rate for each pipe")
        spans = tuple(
            PipeSpan(name, request.start_s, request.end_s, network.pipe(name).rounded_kbps(whole_kbps(gbps)))
            for name, gbps in zip(booking.pipes, booking.rates_gbps, strict=True)
        )
    else:
        service = "bulk"
        spans = tuple(
            PipeSpan(name, one.start_s, one.end_s, network.pipe(name).rounded_kbps(whole_kbps(one.gbps)))
            for name in booking.pipes
            for one in booking.segments
        )
    lacking = bookings.book(booking.request.name, spans, service)
    if lacking is not None:
        raise InputError(
            f"{booking.request.name} is booked with {lacking.kbps / KBPS_PER_GBPS:g} Gbit/s on {lacking.pipe}, "
            "which has less free",
            hint="take `booked` as an earlier answer states it, with the topology of that answer",
        )
