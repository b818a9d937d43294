"""Segmented proxy: connections of workers cross the wide-area link striped over the legs between two proxies."""
