"""Text to token ids and back: tokenizers, chat templates, the table of token bytes. No torch here."""
