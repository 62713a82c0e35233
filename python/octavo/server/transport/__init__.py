"""Sockets, TLS and HTTP: from bytes to one ASGI request."""
