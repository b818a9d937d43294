"""Pipelines over node groups: enumeration, lower bounds and ranking."""
