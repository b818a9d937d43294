"""Adapters between the agent and what runs processes at a site; `local` is built in."""
