"""The REST client of users: `Client`, and what the command line builds on: requests, events, settings, errors."""
