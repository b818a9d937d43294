"""Messages between ranks through torch.distributed, staging through host memory, and step metrics."""
