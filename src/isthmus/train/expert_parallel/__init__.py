"""Expert parallelism: layers whose experts several ranks share."""
