"""The service around the coordinator: clock, threads, store, planner and agent sessions."""
