"""The coordinator's side of the meter: holdings of jobs after each event, and published tariffs."""
