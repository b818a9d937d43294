"""What commands print to a terminal: tables, charts and the live dashboard."""
