"""Heartbeats, stalls, stragglers, worker events and checkpoint requests."""
