"""Sites: closed to new parts, drained, gone from the pool; checks that they reach each other."""
