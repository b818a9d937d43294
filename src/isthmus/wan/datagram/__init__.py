"""Frames over datagrams, as pure state machines: named losses are sent again, and the rate does not follow loss."""
