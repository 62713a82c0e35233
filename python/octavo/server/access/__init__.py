"""Access to the server: Host and origin checks, then API keys."""
