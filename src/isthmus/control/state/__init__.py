"""The pool state: records, indexes, events and invariants."""
