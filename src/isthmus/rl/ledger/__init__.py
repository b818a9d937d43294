"""The trajectory ledger: what became of each prompt, sample and range of tokens."""
