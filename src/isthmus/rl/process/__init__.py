"""The processes of a job with task rl: a training rank that holds the ledger, and ranks that decode."""
