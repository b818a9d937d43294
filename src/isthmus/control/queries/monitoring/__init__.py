"""What the metrics of the server say of the state."""
