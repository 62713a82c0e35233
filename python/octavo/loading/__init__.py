"""Model files: where they are, what they hold, how they are read."""
