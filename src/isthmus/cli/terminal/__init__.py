"""Terminal output of commands: tables, charts and the live dashboard."""
