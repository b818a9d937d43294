"""Process environment of commands: streams, clock, network, signals, logging; replaceable in tests."""
