"""What follows from the accounts: refused starts, levels of budgets, quotes, waits, the view of quotas. Read only."""
