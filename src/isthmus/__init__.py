"""Train one large model across clusters with different owners, chips and locations."""

__version__ = "0.1.0"
