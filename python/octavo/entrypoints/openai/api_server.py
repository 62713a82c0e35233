"""`python -m octavo.entrypoints.openai.api_server --model M` is `octavo serve M`."""

from __future__ import annotations

import sys

from octavo.cli import main
from octavo.cli.vllm_arguments import serve_arguments

__all__ = ["serve_arguments"]


if __name__ == "__main__":
    main(serve_arguments(sys.argv[1:]))
