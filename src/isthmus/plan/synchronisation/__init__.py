"""The choice of a synchronisation strategy for each group of a plan."""
