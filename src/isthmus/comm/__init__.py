"""Communication between workers: the `isthmus` process group of torch.distributed and its transport."""
