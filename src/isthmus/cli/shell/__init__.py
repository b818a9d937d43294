"""The outside world as commands see it, passed in so that tests replace it."""
