"""The server process: configuration, network, TLS, start and stop."""
