"""Tenants with equal addresses, as pure state machines: VXLAN headers, marks, rules of ports, flows, congestion."""
