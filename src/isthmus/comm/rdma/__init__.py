"""Messages by RDMA: the channel, the seam of verbs below it, and the devices behind that."""
