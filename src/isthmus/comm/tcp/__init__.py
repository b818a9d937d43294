"""The TCP transport: connections between ranks, framing, reassembly and reconnection."""
