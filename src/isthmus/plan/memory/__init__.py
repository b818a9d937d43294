"""What a chip holds: a pipeline stage in training, at its fullest, and the table of `isthmus memory`."""
