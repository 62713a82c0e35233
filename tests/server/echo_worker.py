"""An engine worker whose model says its prompt again: whatever tokens a test wants streamed are what it asks with.

Answer i of a request begins at token 7 i of the prompt. The real core, loop and worker are around it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from octavo._core import PARAM_LEN, TokenTable
from octavo.config import EngineConfig
from octavo.engine.loop import EngineLoop
from octavo.engine.loop_builder import build_loop
from octavo.engine.worker import main
from octavo.runner.fake import FakeHandle, FakeRunner, fake_model_info
from octavo.runner.interface import ModelInfo, StepResult

COMMAND = (sys.executable, str(Path(__file__)))
SHIFT = 7
_WORDS = (
    " hello", "world", "<", "|", "im_end", "|>", "END", "STOP", "\n\n", " ", "世", "界", "数据", "한",
    "국어", "가각", "🎉", "👩\u200d👩\u200d👧", "🇫🇷", "e\u0301", "\u0301", "\u200d", "️", "ﷺ", "\ufeff",
    "ß", "\0", "�", "नि", "ก็",
)  # fmt: skip
_PARTS = (
    "🎉".encode()[:2],
    "🎉".encode()[2:],
    "世".encode()[:1],
    "世".encode()[1:],
    b"\xff\xfe",
    b"\xf4\x90",
    b"\xed\xa0\x80",
)
TOKENS: list[bytes] = [bytes([byte]) for byte in range(256)] + [word.encode() for word in _WORDS] + list(_PARTS)
SPECIAL_IDS = (len(TOKENS), len(TOKENS) + 1)
TOKENS += [b"<|special|>", b"<|end|>"]
END = SPECIAL_IDS[1]
MAX_MODEL_LEN = 512
_INDEX, _PROMPT_LENGTH = 9, 12


class EchoRunner(FakeRunner):
    """Samples the prompt's tokens in order."""

    def attach(self, core: Any) -> None:
        super().attach(core)
        self._core = core
        rows = self._last_token.size
        self._prompts: list[np.ndarray] = [np.zeros(1, np.int32)] * rows
        self._shifts = [0] * rows

    def launch(self, plan: Any) -> FakeHandle:
        self.num_steps += 1
        arrays = self._views[plan.arena]
        count = plan.num_param_updates
        values = arrays["param_values"][: count * PARAM_LEN].reshape(count, PARAM_LEN)
        for slot, row in zip(arrays["param_slots"][:count].tolist(), values, strict=True):
            history = np.frombuffer(self._core.history(slot), np.int32)
            self._prompts[slot] = history[: row[_PROMPT_LENGTH]].copy()
            self._shifts[slot] = int(row[_INDEX]) * SHIFT
        logits = arrays["logits_rows"][: plan.num_logits]
        results = self.results[plan.arena]
        for place, (slot, row) in enumerate(zip(arrays["logits_slots"].tolist(), logits.tolist(), strict=False)):
            prompt = self._prompts[slot]
            index = int(arrays["positions"][row]) + 1 - prompt.size
            results[place] = prompt[(index + self._shifts[slot]) % prompt.size]
        return FakeHandle(StepResult(plan.num_logits))


def load(config: EngineConfig, progress: Any) -> tuple[EngineLoop, ModelInfo, None]:
    info = fake_model_info(
        vocab_size=len(TOKENS),
        num_blocks=512,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=config.sequence_counts("cpu")[0],
    )
    info = msgspec.structs.replace(info, eos_token_ids=(END,))
    flags = bytes(token in SPECIAL_IDS for token in range(len(TOKENS)))
    return build_loop(config, EchoRunner(info), info, TokenTable(TOKENS, flags)), info, None


if __name__ == "__main__":
    sys.exit(main(load=load))
