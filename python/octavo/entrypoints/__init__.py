"""Module names that vLLM's users start servers with."""
