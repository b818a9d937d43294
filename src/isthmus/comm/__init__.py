"""Communication between workers: transports, and the `isthmus` process group of torch.distributed on top.

Import modules by name: the transport modules do not import torch, so the transport process starts without it.
"""
