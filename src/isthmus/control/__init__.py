"""The pool's control plane: a pure coordinator, the store of its events, and the server around them."""
