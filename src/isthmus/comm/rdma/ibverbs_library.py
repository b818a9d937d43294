"""libibverbs through ctypes: its functions, the structures that a channel needs, and the calls that its header inlines.

Source: `infiniband/verbs.h` of rdma-core. Programs have these layouts compiled in, so they are the library's ABI
(IBVERBS_1.1). `poll_cq`, `req_notify_cq`, `post_send` and `post_recv` are no symbols: the header calls them through the
table of operations in the device's context. A test compares all offsets with the header, where one is installed.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_ubyte, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

NUM_OPERATIONS = 32
POLL_CQ, REQ_NOTIFY_CQ, POST_SEND, POST_RECV = 11, 12, 25, 26
"""Places in `struct ibv_context_ops`."""


_TYPES: dict[str, Any] = {
    "p": c_void_p, "n": c_size_t, "i": c_int, "b": c_ubyte, "h": c_uint16, "w": c_uint32, "q": c_uint64,
}  # fmt: skip


def _fields(text: str, **inner: Any) -> list[tuple[str, Any]]:
    """Return the fields of a structure from `name:type` each; a type is a letter of `_TYPES`, or one of `inner`."""
    pairs = [one.split(":") for one in text.split()]
    return [(name, inner[kind] if kind in inner else _TYPES[kind]) for name, kind in pairs]


class Context(Structure):
    """`struct ibv_context`, up to its operations."""

    _fields_ = _fields("device:p ops:table", table=c_void_p * NUM_OPERATIONS)


class CompletionChannel(Structure):
    """`struct ibv_comp_channel`."""

    _fields_ = _fields("context:p fd:i refcnt:i")


class MemoryRegion(Structure):
    """`struct ibv_mr`."""

    _fields_ = _fields("context:p pd:p addr:p length:n handle:w lkey:w rkey:w")


class QueuePair(Structure):
    """`struct ibv_qp`, up to its number."""

    _fields_ = _fields("context:p qp_context:p pd:p send_cq:p recv_cq:p srq:p handle:w qp_num:w")


class QueuePairCapacity(Structure):
    """`struct ibv_qp_cap`."""

    _fields_ = _fields("max_send_wr:w max_recv_wr:w max_send_sge:w max_recv_sge:w max_inline_data:w")


class QueuePairSetup(Structure):
    """`struct ibv_qp_init_attr`."""

    _fields_ = _fields("qp_context:p send_cq:p recv_cq:p srq:p cap:c qp_type:i sq_sig_all:i", c=QueuePairCapacity)


class AddressHandle(Structure):
    """`struct ibv_ah_attr` with its `struct ibv_global_route`."""

    _fields_ = _fields(
        "dgid:gid flow_label:w sgid_index:b hop_limit:b traffic_class:b _end:b dlid:h sl:b src_path_bits:b"
        " static_rate:b is_global:b port_num:b",
        gid=c_uint64 * 2,
    )


class QueuePairChange(Structure):
    """`struct ibv_qp_attr`."""

    _fields_ = _fields(
        "qp_state:i cur_qp_state:i path_mtu:i path_mig_state:i qkey:w rq_psn:w sq_psn:w dest_qp_num:w"
        " qp_access_flags:w cap:c ah_attr:a alt_ah_attr:a pkey_index:h alt_pkey_index:h en_sqd_async_notify:b"
        " sq_draining:b max_rd_atomic:b max_dest_rd_atomic:b min_rnr_timer:b port_num:b timeout:b retry_cnt:b"
        " rnr_retry:b alt_port_num:b alt_timeout:b rate_limit:w",
        c=QueuePairCapacity,
        a=AddressHandle,
    )


class PortState(Structure):
    """`struct ibv_port_attr` up to `link_layer`, and room for what later versions have behind it."""

    _fields_ = _fields(
        "state:i max_mtu:i active_mtu:i gid_tbl_len:i port_cap_flags:w max_msg_sz:w bad_pkey_cntr:w qkey_viol_cntr:w"
        " pkey_tbl_len:h lid:h sm_lid:h lmc:b max_vl_num:b sm_sl:b subnet_timeout:b init_type_reply:b active_width:b"
        " active_speed:b phys_state:b link_layer:b _more:room",
        room=c_ubyte * 64,
    )


class Segment(Structure):
    """`struct ibv_sge`."""

    _fields_ = _fields("addr:q length:w lkey:w")


class SendWork(Structure):
    """`struct ibv_send_wr`; of its unions only the part of an RDMA WRITE."""

    _fields_ = _fields(
        "wr_id:q next:p sg_list:s num_sge:i opcode:i send_flags:w imm_data:w remote_addr:q rkey:w _unions:rest",
        s=POINTER(Segment),
        rest=c_ubyte * 76,
    )


class ReceiveWork(Structure):
    """`struct ibv_recv_wr`."""

    _fields_ = _fields("wr_id:q next:p sg_list:s num_sge:i", s=POINTER(Segment))


class WorkCompletion(Structure):
    """`struct ibv_wc`."""

    _fields_ = _fields(
        "wr_id:q status:i opcode:i vendor_err:w byte_len:w imm_data:w qp_num:w src_qp:w wc_flags:w pkey_index:h"
        " slid:h sl:b dlid_path_bits:b"
    )


_POINTERS = {
    "ibv_get_device_list": [POINTER(c_int)],
    "ibv_open_device": [c_void_p],
    "ibv_alloc_pd": [c_void_p],
    "ibv_reg_mr": [c_void_p, c_void_p, c_size_t, c_int],
    "ibv_create_comp_channel": [c_void_p],
    "ibv_create_cq": [c_void_p, c_int, c_void_p, c_void_p, c_int],
    "ibv_create_qp": [c_void_p, POINTER(QueuePairSetup)],
}
_RESULTS = {
    "ibv_get_device_list": POINTER(c_void_p),
    "ibv_open_device": POINTER(Context),
    "ibv_reg_mr": POINTER(MemoryRegion),
    "ibv_create_comp_channel": POINTER(CompletionChannel),
    "ibv_create_qp": POINTER(QueuePair),
}
_NUMBERS = {
    "ibv_close_device": [c_void_p],
    "ibv_query_port": [c_void_p, c_ubyte, POINTER(PortState)],
    "ibv_query_gid": [c_void_p, c_ubyte, c_int, c_void_p],
    "ibv_modify_qp": [c_void_p, POINTER(QueuePairChange), c_int],
    "ibv_get_cq_event": [c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    "ibv_destroy_qp": [c_void_p],
    "ibv_destroy_cq": [c_void_p],
    "ibv_destroy_comp_channel": [c_void_p],
    "ibv_dereg_mr": [c_void_p],
    "ibv_dealloc_pd": [c_void_p],
}

_POST = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_void_p), use_errno=True)
_POLL = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
_NOTIFY = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)


class Operations:
    """The calls that the header inlines, from the table of a device's context."""

    def __init__(self, context: Context) -> None:
        table = context.ops
        self.poll_cq, self.req_notify_cq = _POLL(table[POLL_CQ]), _NOTIFY(table[REQ_NOTIFY_CQ])
        self.post_send, self.post_recv = _POST(table[POST_SEND]), _POST(table[POST_RECV])


@cache
def load_library(path: str = "libibverbs.so.1") -> ctypes.CDLL:
    """Return libibverbs with the types of its functions; raises `OSError` where it is not installed."""
    library = ctypes.CDLL(path, use_errno=True)
    for name, arguments in {**_POINTERS, **_NUMBERS}.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name, c_void_p if name in _POINTERS else c_int)
    library.ibv_get_device_name.argtypes, library.ibv_get_device_name.restype = [c_void_p], c_char_p
    library.ibv_wc_status_str.argtypes, library.ibv_wc_status_str.restype = [c_int], c_char_p
    library.ibv_ack_cq_events.argtypes, library.ibv_ack_cq_events.restype = [c_void_p, c_uint32], None
    library.ibv_free_device_list.argtypes, library.ibv_free_device_list.restype = [POINTER(c_void_p)], None
    return library
