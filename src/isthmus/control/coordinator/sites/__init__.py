"""The membership of sites: closed to new parts, drained, gone from the pool."""
