"""The edge of a site: rates of bookings in the kernel of the machine that its flows leave by."""
