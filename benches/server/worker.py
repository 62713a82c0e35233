"""An engine worker without a model, for measuring the API process: it answers at once, or at a given pace.

Speaks the worker's protocol like `octavo.engine.worker`. Every token's text is the time at which its step was sent
(`~` and twelve digits: microseconds of CLOCK_MONOTONIC), so that whoever reads it can tell how long it was on its way.

The settings' `model` says how it behaves, as `fake:steps_per_s=100`; 0, the default, is as fast as it goes: up to
what the socket and its buffer hold ahead of the API process.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from typing import Any

import msgspec
import numpy as np
from octavo.engine.connection import ClientGone, Connection
from octavo.engine.protocol import Abort, Load, Ready, Stats, StatsQuery, StepOutputs, Submit
from octavo.runner.interface import ModelInfo
from octavo.sampling_params import SamplingParams

VOCAB_SIZE = 49152
MAX_MODEL_LEN = 1 << 16
_DECODER = msgspec.msgpack.Decoder(SamplingParams)
_LENGTH = 2
_NO_STOP_REASON = -(1 << 31)
_STATS = (
    "running", "waiting", "deferred", "blocks_total", "blocks_used", "blocks_free", "blocks_cached",
    "prefix_query_tokens", "prefix_hit_tokens", "preemptions", "evictions", "allocations", "frees", "steps",
)  # fmt: skip


class _Answers:
    """What is to be answered, an entry a sequence."""

    def __init__(self) -> None:
        self.request_ids = np.zeros(0, np.int64)
        self.samples = np.zeros(0, np.int32)
        self.left = np.zeros(0, np.int64)
        self._arrays: dict[str, bytes] = {}

    def add(self, message: Submit) -> None:
        """Begin to answer requests."""
        asked = [(request.request_id, _DECODER.decode(request.params)) for request in message.requests]
        ids = [request_id for request_id, params in asked for _ in range(params.n)]
        samples = [index for _, params in asked for index in range(params.n)]
        left = [params.max_tokens or 1 for _, params in asked for _ in range(params.n)]
        self.request_ids = np.concatenate((self.request_ids, np.array(ids, np.int64)))
        self.samples = np.concatenate((self.samples, np.array(samples, np.int32)))
        self.left = np.concatenate((self.left, np.array(left, np.int64)))
        self._arrays = {}

    def keep(self, chosen: Any) -> None:
        """Forget all but the chosen."""
        self.request_ids, self.samples, self.left = self.request_ids[chosen], self.samples[chosen], self.left[chosen]
        self._arrays = {}

    def step(self) -> StepOutputs:
        """A token for each."""
        count = self.left.size
        text = b"~%012d" % (time.monotonic_ns() // 1000)
        if not self._arrays:
            self._arrays = {
                "request_ids": self.request_ids.tobytes(),
                "sample_indices": self.samples.tobytes(),
                "token_ids": np.full(count, 17, np.int32).tobytes(),
                "text_ends": (np.arange(1, count + 1, dtype=np.int32) * len(text)).tobytes(),
                "finish_reasons": bytes(4 * count),
                "stop_reasons": np.full(count, _NO_STOP_REASON, np.int32).tobytes(),
                "cached_tokens": bytes(4 * count),
            }
        self.left -= 1
        ended = self.left == 0
        arrays = self._arrays
        if ended.any():
            arrays = arrays | {"finish_reasons": (ended * _LENGTH).astype(np.int32).tobytes()}
            self.keep(~ended)
        return StepOutputs(text=text * count, **arrays)


def serve(connection: Connection) -> None:
    """Answer one client until it has gone."""
    messages: list[Any] = []
    while not messages:
        messages = connection.exchange(block=True)
    assert isinstance(messages[0], Load)
    model = messages[0].config.model
    options = dict(item.split("=") for item in model.partition(":")[2].split(",") if item)
    steps_per_s = float(options.get("steps_per_s", 0))
    connection.send(
        Ready(
            ModelInfo(
                name="fake",
                architecture="Fake",
                max_model_len=MAX_MODEL_LEN,
                vocab_size=VOCAB_SIZE,
                num_blocks=1024,
                block_size=16,
                max_num_seqs=256,
                dtype="float32",
                device="cpu",
                weights_bytes=0,
                kv_bytes=0,
            )
        )
    )
    answers = _Answers()
    due = time.monotonic()
    while True:
        for message in connection.exchange(block=connection.clogged or not answers.left.size):
            if isinstance(message, Submit):
                answers.add(message)
            elif isinstance(message, Abort):
                answers.keep(~np.isin(answers.request_ids, message.request_ids))
            elif isinstance(message, StatsQuery):
                connection.send(Stats(message.query_id, {**dict.fromkeys(_STATS, 0), "running": answers.left.size}))
        if not answers.left.size or connection.clogged:
            continue
        if steps_per_s:
            due = max(due + 1 / steps_per_s, time.monotonic() - 1 / steps_per_s)
            time.sleep(max(0.0, due - time.monotonic()))
        connection.send(answers.step())


def main() -> int:
    """Serve the process that started this one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    # What else a worker is told concerns its supervision.
    options, _ = parser.parse_known_args()
    try:
        serve(Connection(socket.socket(fileno=options.fd)))
    except ClientGone:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
