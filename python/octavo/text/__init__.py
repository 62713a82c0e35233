"""Text to token ids and back: tokenizers of every kind, chat templates, the table of token bytes. No torch here."""
