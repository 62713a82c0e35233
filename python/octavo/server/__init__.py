"""The HTTP server. Knows no torch."""
