"""A simulated run as an HTML page or a Chrome trace."""
