"""Benchmarks: `python -m benchmarks.NAME [--json] [--quick]`; each prints `benchmarks.table` rows."""
