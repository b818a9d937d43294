"""The transport interface, its in-memory fake and its conformance kit."""
