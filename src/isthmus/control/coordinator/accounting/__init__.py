"""What the coordinator tells the meter: holdings of jobs after each event, and published tariffs."""
