"""The rules of site adapters, one function each; `check_adapter` runs them."""
