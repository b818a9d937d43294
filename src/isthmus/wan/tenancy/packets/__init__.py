"""Packets of tenant gateways to the byte: buffers, VXLAN, inner frames, marks, heartbeats, frames in TCP."""
