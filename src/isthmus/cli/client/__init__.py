"""The REST client of the command line: requests, event stream, settings and errors."""
