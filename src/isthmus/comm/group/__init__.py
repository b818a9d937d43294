"""Process groups of torch.distributed: `isthmus` over a transport, gloo inside a cluster."""
