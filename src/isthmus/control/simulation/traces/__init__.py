"""Job traces: reading, generating, and turning them into submissions and plans."""
