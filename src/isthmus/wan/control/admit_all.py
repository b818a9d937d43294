"""`admit_all`: the requests of a file, one after the other."""

from __future__ import annotations

from isthmus.wan.control.admit import admit
from isthmus.wan.control.wan_topology import Admission, AdmissionFile, Booking, PathRefusal


def admit_all(wanted: AdmissionFile) -> Admission:
    """Return what `admit` answers to each request, each beside all that were booked before."""
    booked, refused = list(wanted.booked), list[PathRefusal]()
    for request in wanted.requests:
        found = admit(wanted.topology, booked, request)
        if isinstance(found, Booking):
            booked.append(found)
        else:
            refused.append(found)
    return Admission(admitted=tuple(booked[len(wanted.booked) :]), refused=tuple(refused), booked=tuple(booked))
