"""PASSING as an all-reduce of a process group: shares inside a cluster, their sums by switches or without."""
