"""`admit_all`: the bookings, requests and transfers of a file, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.core.errors import InputError
from isthmus.wan.control.wan_topology import (
    Admission,
    AdmissionFile,
    Booking,
    PathRefusal,
    PathRequest,
    TransferBooking,
    TransferRequest,
    TransferSegment,
)
from isthmus.wan.controller.book_stated import book_stated
from isthmus.wan.controller.displace_bulk import displace_bulk
from isthmus.wan.controller.path_plan import PathPlan, plan_path
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.plan_transfer import plan_transfer
from isthmus.wan.controller.wan_network import KBPS_PER_GBPS, WanNetwork


def admit_all(wanted: AdmissionFile) -> Admission:
    """Return what became of a file: bookings on failed pipes are moved, then requests and transfers are planned.

    Where training has no path, bulk bookings give way to it and are planned again. Raises `InputError` for bookings
    that do not fit their pipes.
    """
    book = _Book(wanted)
    return book.answer()


class _Book:
    """All bookings by name while a file is answered."""

    def __init__(self, wanted: AdmissionFile) -> None:
        self._network = WanNetwork(wanted.topology)
        self._bookings = PipeBookings(self._network.pipes, wanted.topology.bulk_share)
        for name in wanted.down:
            self._network.pipe(name)
        self._bookings.down.update(wanted.down)
        self._booked: dict[str, Booking | TransferBooking] = {}
        self._refused: dict[str, PathRefusal] = {}
        self._moved: dict[str, None] = {}
        self._admit_file(wanted)

    def answer(self) -> Admission:
        """Return what became of everything."""
        paths = tuple(one for one in self._booked.values() if isinstance(one, Booking))
        transfers = tuple(one for one in self._booked.values() if isinstance(one, TransferBooking))
        return Admission(
            admitted=tuple(one for one in paths if one.request.name in self._new),
            refused=tuple(self._refused.values()),
            booked=paths,
            transfers=tuple(one for one in transfers if one.request.name in self._new),
            booked_transfers=transfers,
            moved=tuple(name for name in self._moved if name in self._booked and name not in self._new),
        )

    def _admit_file(self, wanted: AdmissionFile) -> None:
        failed: list[PathRequest | TransferRequest] = []
        self._new: set[str] = set()
        booked: list[Booking | TransferBooking] = [*wanted.booked, *wanted.booked_transfers]
        for one in booked:
            if one.request.name in self._booked or any(one.request.name == other.name for other in failed):
                raise InputError(f"{one.request.name} is booked twice", hint="give each booking a name of its own")
            if self._bookings.down.intersection(one.pipes):
                failed.append(one.request)
            else:
                book_stated(self._network, self._bookings, one)
                self._booked[one.request.name] = one
        for request in sorted(failed, key=lambda one: not _is_training(one)):
            self._moved[request.name] = None
            self._plan(request)
        asked: list[PathRequest | TransferRequest] = [*wanted.requests, *wanted.transfers]
        for request in asked:
            if request.name in self._booked:
                reason = f"{request.name} is booked already"
                self._refused[request.name] = PathRefusal(name=request.name, reason=reason, nearest_gbps=0.0)
                continue
            self._new.add(request.name)
            self._plan(request)

    def _plan(self, request: PathRequest | TransferRequest) -> None:
        """Book a path, at the cost of bulk bookings where training has none."""
        displaced: list[PathRequest | TransferRequest] = []
        if isinstance(request, TransferRequest):
            found = plan_transfer(self._network, self._bookings, request)
        else:
            found = plan_path(self._network, self._bookings, request)
            if isinstance(found, PathRefusal) and (instead := self._displace(request)):
                found, displaced = instead
            elif isinstance(found, PathRefusal):
                found = plan_path(self._network, self._bookings, request, explains=True)
        if isinstance(found, PathRefusal):
            self._refused[request.name] = found
            return
        self._bookings.book(request.name, found.spans, found.service)
        self._booked[request.name] = _booking(request, found)
        for one in displaced:
            if one.name not in self._new:
                self._moved[one.name] = None
            self._plan(one)

    def _displace(self, request: PathRequest) -> tuple[PathPlan, list[PathRequest | TransferRequest]] | None:
        found = displace_bulk(self._network, self._bookings, request, ())
        if found is None:
            return None
        return found[0], [self._booked.pop(str(key)).request for key in found[1]]


def _is_training(request: PathRequest | TransferRequest) -> bool:
    return isinstance(request, PathRequest) and request.service == "training"


def _booking(request: PathRequest | TransferRequest, plan: PathPlan) -> Booking | TransferBooking:
    if isinstance(request, PathRequest):
        return Booking(
            request=request,
            pipes=plan.pipes,
            rates_gbps=tuple(_gbps(span.kbps for span in plan.spans)),
            delay_ms=plan.delay_ms,
            jitter_ms=plan.jitter_ms,
            loss=plan.loss,
        )
    return TransferBooking(
        request=request,
        pipes=plan.pipes,
        segments=tuple(
            TransferSegment(start_s=start_s, end_s=end_s, gbps=kbps / KBPS_PER_GBPS)
            for start_s, end_s, kbps in plan.rates_kbps
        ),
        end_s=plan.rates_kbps[-1][1],
        delay_ms=plan.delay_ms,
        jitter_ms=plan.jitter_ms,
        loss=plan.loss,
    )


def _gbps(rates_kbps: Iterable[int]) -> Iterable[float]:
    return (kbps / KBPS_PER_GBPS for kbps in rates_kbps)
