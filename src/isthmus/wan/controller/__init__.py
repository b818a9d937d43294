"""A deterministic wide-area network: a decision centre plans paths, controllers of domains hold them."""
