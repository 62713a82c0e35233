"""Arguments as vLLM's users type them."""

from __future__ import annotations

__all__ = ["serve_arguments"]


def serve_arguments(arguments: list[str]) -> list[str]:
    """The command line of `octavo` that serves: each `--model M` becomes an argument of the command."""
    rest: list[str] = []
    models: list[str] = []
    waiting = False
    for argument in arguments:
        if waiting:
            waiting = False
            models.append(argument)
        elif argument == "--model":
            waiting = True
        elif argument.startswith("--model="):
            models.append(argument.removeprefix("--model="))
        else:
            rest.append(argument)
    return ["serve", *rest, *(["--", *models] if models else [])]
