"""Context parallelism: sequences whose tokens several ranks share."""
