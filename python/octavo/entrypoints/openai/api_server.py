"""`python -m octavo.entrypoints.openai.api_server --model M` is `octavo serve M`."""

from __future__ import annotations

import sys

from octavo.cli import main

__all__ = ["serve_arguments"]


def serve_arguments(arguments: list[str]) -> list[str]:
    """The arguments of `octavo` for those of this module: `--model M` becomes the command's argument."""
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


if __name__ == "__main__":
    main(serve_arguments(sys.argv[1:]))
