"""The nouns, the files users write, the messages between processes, every error: what all packages share."""
