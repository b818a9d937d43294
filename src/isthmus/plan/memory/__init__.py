"""Memory per chip: the peak of a pipeline stage in training, and the table of `isthmus memory`."""
