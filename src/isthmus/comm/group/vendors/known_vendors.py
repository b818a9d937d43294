"""`available_vendors`: the libraries that this process has, by the type of device."""

from __future__ import annotations

from isthmus.comm.group.vendors.gloo_vendor import GLOO
from isthmus.comm.group.vendors.hccl_vendor import HCCL
from isthmus.comm.group.vendors.mpi_vendor import MPI
from isthmus.comm.group.vendors.nccl_vendor import NCCL
from isthmus.comm.group.vendors.vendor import Vendor
from isthmus.comm.group.vendors.xccl_vendor import XCCL

VENDORS = (MPI, GLOO, NCCL, HCCL, XCCL)
"""Of two for one type of device, the first that is available is used."""


def available_vendors() -> dict[str, Vendor]:
    """Return the library for each type of device that torch reports here."""
    found: dict[str, Vendor] = {}
    for one in VENDORS:
        if one.device_type not in found and one.is_available():
            found[one.device_type] = one
    return found
