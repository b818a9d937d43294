"""Text for people: pages, and the characters of words from others that would control a terminal."""
