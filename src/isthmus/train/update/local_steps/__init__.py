"""Local SGD: replica groups take several steps apart, then an outer optimizer averages their weights."""
