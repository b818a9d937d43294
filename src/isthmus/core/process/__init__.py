"""What a process has of its machine: a clock, stop signals, and the lock of its state folder."""
