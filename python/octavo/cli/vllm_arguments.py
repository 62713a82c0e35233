"""Arguments as vLLM's users type them."""

from __future__ import annotations

__all__ = ["serve_arguments"]


def serve_arguments(arguments: list[str]) -> list[str]:
    """The command line of `octavo` that serves: `--model M` becomes the command's argument."""
    rest: list[str] = []
    model: list[str] = []
    waiting = False
    for argument in arguments:
        if waiting:
            model, waiting = [argument], False
        elif argument == "--model":
            waiting = True
        elif argument.startswith("--model="):
            model = [argument.removeprefix("--model=")]
        else:
            rest.append(argument)
    return ["serve", *rest, *(["--", *model] if model else [])]
