"""Adapters between the agent and a site's scheduler; `local_adapter` is built in."""
