"""Who may ask: API keys, host and origin checks."""
