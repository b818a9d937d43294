"""Messages between ranks through torch.distributed, and what carries them."""
