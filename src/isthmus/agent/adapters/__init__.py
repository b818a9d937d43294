"""Adapters between the agent and a site's scheduler; `local` is built in."""
