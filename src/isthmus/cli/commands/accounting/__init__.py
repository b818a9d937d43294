"""The commands on money: tariffs, statements, the ledger and quotas."""
