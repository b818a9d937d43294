"""Durable storage of the control plane behind one interface, `Store`, and leader election on it."""
