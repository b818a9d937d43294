"""What a run does when a rank dies, stalls or slows down: it is started again in place."""
