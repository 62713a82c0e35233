"""Tokenizers, chat templates and the token-bytes table. Knows no torch."""
