"""Continuous batching, pure: which rows each step computes, in which pages of the cache they are kept."""
