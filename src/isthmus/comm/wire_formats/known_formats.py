"""`WIRE_FORMATS`: the wire formats by name."""

from __future__ import annotations

from isthmus.comm.wire_formats.bf16 import Bf16
from isthmus.comm.wire_formats.block_int8 import BlockInt8
from isthmus.comm.wire_formats.fp32 import Fp32
from isthmus.comm.wire_formats.scaled_int16 import ScaledInt16
from isthmus.comm.wire_formats.scaled_int32 import ScaledInt32
from isthmus.comm.wire_formats.wire_format import WireFormat

_KNOWN: tuple[WireFormat, ...] = (Fp32(), Bf16(), ScaledInt32(), ScaledInt16(), BlockInt8())

WIRE_FORMATS = {one.name: one for one in _KNOWN}
