"""The pool simulator: the server's coordinator under a virtual clock, over simulated sites."""
