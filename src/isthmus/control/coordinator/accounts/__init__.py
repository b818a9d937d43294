"""The coordinator's side of accounts: setting them, counting what jobs spend, pausing jobs whose budget is used up."""
