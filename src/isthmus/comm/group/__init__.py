"""torch.distributed process groups: `isthmus` over a transport, gloo inside a cluster."""
