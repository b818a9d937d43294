"""Isthmus trains one large model on clusters that differ in owner, chip and place."""

__version__ = "0.1.0"
