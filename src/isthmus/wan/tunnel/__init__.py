"""Tunnels between two proxies as pure state machines: frames, order, acknowledgements, credit, legs."""
