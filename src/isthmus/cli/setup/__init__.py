"""`isthmus init` and `isthmus doctor`: first files of a user, and what is installed and reachable."""
