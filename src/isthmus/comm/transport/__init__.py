"""The transport seam: its interface, its in-memory form and its conformance kit."""
