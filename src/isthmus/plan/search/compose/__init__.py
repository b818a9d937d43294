"""The best combination of one chain per replica group."""
