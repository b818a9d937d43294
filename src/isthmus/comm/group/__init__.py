"""torch.distributed process groups: `isthmus` over a transport, vendors' libraries inside clusters."""
