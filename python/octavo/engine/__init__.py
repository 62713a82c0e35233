"""The loop, `LLM`, `AsyncEngine` and the worker process."""
