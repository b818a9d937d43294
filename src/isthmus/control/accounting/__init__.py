"""The meter and the ledger: what jobs hold of owners, priced by tariffs, in double entry. Pure."""
