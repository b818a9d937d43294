"""libibverbs through ctypes: its functions, the structures that a channel needs, and the calls that its header inlines.

Source: `infiniband/verbs.h` of rdma-core. Programs have these layouts compiled in, so they are the library's ABI
(IBVERBS_1.1). `poll_cq`, `req_notify_cq`, `post_send` and `post_recv` are no symbols: the header calls them through the
table of operations in the device's context. A test compares all offsets with the header, where one is installed.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_ubyte, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache

NUM_OPERATIONS = 32
POLL_CQ, REQ_NOTIFY_CQ, POST_SEND, POST_RECV = 11, 12, 25, 26
"""Places in `struct ibv_context_ops`."""


class Context(Structure):
    """`struct ibv_context`, up to its operations."""

    _fields_ = [("device", c_void_p), ("ops", c_void_p * NUM_OPERATIONS)]


class CompletionChannel(Structure):
    """`struct ibv_comp_channel`."""

    _fields_ = [("context", c_void_p), ("fd", c_int), ("refcnt", c_int)]


class MemoryRegion(Structure):
    """`struct ibv_mr`."""

    _fields_ = [
        ("context", c_void_p), ("pd", c_void_p), ("addr", c_void_p), ("length", c_size_t), ("handle", c_uint32),
        ("lkey", c_uint32), ("rkey", c_uint32),
    ]  # fmt: skip


class QueuePair(Structure):
    """`struct ibv_qp`, up to its number."""

    _fields_ = [
        ("context", c_void_p), ("qp_context", c_void_p), ("pd", c_void_p), ("send_cq", c_void_p),
        ("recv_cq", c_void_p), ("srq", c_void_p), ("handle", c_uint32), ("qp_num", c_uint32),
    ]  # fmt: skip


class QueuePairCapacity(Structure):
    """`struct ibv_qp_cap`."""

    _fields_ = [(name, c_uint32) for name in (
        "max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")]  # fmt: skip


class QueuePairSetup(Structure):
    """`struct ibv_qp_init_attr`."""

    _fields_ = [
        ("qp_context", c_void_p), ("send_cq", c_void_p), ("recv_cq", c_void_p), ("srq", c_void_p),
        ("cap", QueuePairCapacity), ("qp_type", c_int), ("sq_sig_all", c_int),
    ]  # fmt: skip


class AddressHandle(Structure):
    """`struct ibv_ah_attr` with its `struct ibv_global_route`."""

    _fields_ = [
        ("dgid", c_uint64 * 2), ("flow_label", c_uint32), ("sgid_index", c_ubyte), ("hop_limit", c_ubyte),
        ("traffic_class", c_ubyte), ("_end", c_ubyte), ("dlid", c_uint16), ("sl", c_ubyte),
        ("src_path_bits", c_ubyte), ("static_rate", c_ubyte), ("is_global", c_ubyte), ("port_num", c_ubyte),
    ]  # fmt: skip


class QueuePairChange(Structure):
    """`struct ibv_qp_attr`."""

    _fields_ = [
        ("qp_state", c_int), ("cur_qp_state", c_int), ("path_mtu", c_int), ("path_mig_state", c_int),
        ("qkey", c_uint32), ("rq_psn", c_uint32), ("sq_psn", c_uint32), ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32), ("cap", QueuePairCapacity), ("ah_attr", AddressHandle),
        ("alt_ah_attr", AddressHandle), ("pkey_index", c_uint16), ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_ubyte), ("sq_draining", c_ubyte), ("max_rd_atomic", c_ubyte),
        ("max_dest_rd_atomic", c_ubyte), ("min_rnr_timer", c_ubyte), ("port_num", c_ubyte), ("timeout", c_ubyte),
        ("retry_cnt", c_ubyte), ("rnr_retry", c_ubyte), ("alt_port_num", c_ubyte), ("alt_timeout", c_ubyte),
        ("rate_limit", c_uint32),
    ]  # fmt: skip


class PortState(Structure):
    """`struct ibv_port_attr` up to `link_layer`, and room for what later versions have behind it."""

    _fields_ = [
        ("state", c_int), ("max_mtu", c_int), ("active_mtu", c_int), ("gid_tbl_len", c_int),
        ("port_cap_flags", c_uint32), ("max_msg_sz", c_uint32), ("bad_pkey_cntr", c_uint32),
        ("qkey_viol_cntr", c_uint32), ("pkey_tbl_len", c_uint16), ("lid", c_uint16), ("sm_lid", c_uint16),
        ("lmc", c_ubyte), ("max_vl_num", c_ubyte), ("sm_sl", c_ubyte), ("subnet_timeout", c_ubyte),
        ("init_type_reply", c_ubyte), ("active_width", c_ubyte), ("active_speed", c_ubyte), ("phys_state", c_ubyte),
        ("link_layer", c_ubyte), ("_more", c_ubyte * 64),
    ]  # fmt: skip


class Segment(Structure):
    """`struct ibv_sge`."""

    _fields_ = [("addr", c_uint64), ("length", c_uint32), ("lkey", c_uint32)]


class SendWork(Structure):
    """`struct ibv_send_wr`; of its unions only the part of an RDMA WRITE."""

    _fields_ = [
        ("wr_id", c_uint64), ("next", c_void_p), ("sg_list", POINTER(Segment)), ("num_sge", c_int),
        ("opcode", c_int), ("send_flags", c_uint32), ("imm_data", c_uint32), ("remote_addr", c_uint64),
        ("rkey", c_uint32), ("_unions", c_ubyte * 76),
    ]  # fmt: skip


class ReceiveWork(Structure):
    """`struct ibv_recv_wr`."""

    _fields_ = [("wr_id", c_uint64), ("next", c_void_p), ("sg_list", POINTER(Segment)), ("num_sge", c_int)]


class WorkCompletion(Structure):
    """`struct ibv_wc`."""

    _fields_ = [
        ("wr_id", c_uint64), ("status", c_int), ("opcode", c_int), ("vendor_err", c_uint32), ("byte_len", c_uint32),
        ("imm_data", c_uint32), ("qp_num", c_uint32), ("src_qp", c_uint32), ("wc_flags", c_uint32),
        ("pkey_index", c_uint16), ("slid", c_uint16), ("sl", c_ubyte), ("dlid_path_bits", c_ubyte),
    ]  # fmt: skip


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
