"""Records that owners keep themselves of what parts held of their cards, and their comparison with the ledger."""
