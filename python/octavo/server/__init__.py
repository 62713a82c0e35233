"""The HTTP server. Knows no torch.

`octavo.server.app` holds what is served and the ASGI application over it; `octavo.server.lifecycle.serve` runs that on
a socket of `octavo.server.transport.listen.bind`.
"""
