"""The catalogue's transitions: its entries, and the copies that sites report."""
