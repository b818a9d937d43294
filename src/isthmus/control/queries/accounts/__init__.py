"""What follows from the accounts: refusals of starts, levels of budgets, quotes, and the view of quotas. Read only."""
