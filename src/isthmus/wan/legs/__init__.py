"""Legs: authenticated, encrypted connections between two proxies, over TCP streams or datagrams."""
