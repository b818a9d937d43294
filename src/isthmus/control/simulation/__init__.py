"""The pool simulator: the server's coordinator on a virtual clock, with simulated sites."""
