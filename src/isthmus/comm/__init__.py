"""Communication between workers: transports, and the `isthmus` process group of torch.distributed over one.

Modules are imported by name: those of the transport know nothing of torch, and its process starts without it.
"""
