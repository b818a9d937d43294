"""The commands on money: tariffs, statements and the ledger."""
