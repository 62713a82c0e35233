"""Which engine answers a name."""
