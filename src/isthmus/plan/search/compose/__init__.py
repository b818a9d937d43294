"""The best combination of one pipeline per replica group."""
