"""What an event has to be told to those who subscribed."""
