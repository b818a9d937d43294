"""One pipeline schedule on the event kernel."""
