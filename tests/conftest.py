"""What every test may rely on."""

from __future__ import annotations

import signal

# A shell starts background jobs (`make test &`) with SIGINT ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
