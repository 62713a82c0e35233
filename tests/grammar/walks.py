"""A model that draws any allowed token: the core, the constraints, and chance."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from octavo import _core

STOP, LENGTH = 1, 2


@dataclass
class Answer:
    """What one answer came to.

    Attributes:
        text: as the core streams it.
        tokens: drawn, an end token too.
        finish_reason: `STOP` or `LENGTH`.
        masks: how many tokens each mask allowed.
    """

    text: str
    tokens: list[int]
    finish_reason: int
    masks: list[int]


class Walker:
    """Draws tokens at random from the masks of all requests at once.

    `end` is the chance that an end token is drawn where one is allowed among others.
    """

    def __init__(
        self,
        words: list[bytes],
        eos: list[int],
        *,
        flags: bytes | None = None,
        drop_leading_space: bool = False,
        end: float = 0.2,
        max_model_len: int = 640,
    ) -> None:
        self.words, self.eos, self.end = words, eos, end
        special = bytes(token in eos for token in range(len(words)))
        self.table = _core.TokenTable(words, flags or special, drop_leading_space=drop_leading_space)
        self.vocabulary = _core.Vocabulary(self.table, eos, len(words))
        self.constraints = _core.Constraints(self.vocabulary)
        self.row_words = -(-len(words) // 32)
        rows = 16
        self.core = _core.Core(
            block_size=16,
            num_blocks=rows * max_model_len // 16 + 1,
            max_num_seqs=rows,
            max_num_batched_tokens=256,
            max_model_len=max_model_len,
            vocab_size=len(words),
            eos_token_ids=eos,
            token_table=self.table,
        )
        self.arenas = np.zeros((3, self.core.arena_len()), np.int32)
        self.results = np.zeros((3, rows), np.int32)
        regions = [[(row.ctypes.data, row.size) for row in part] for part in (self.arenas, self.results)]
        self.core.attach(*regions, (self.arenas, self.results))
        self.layout = {name: offset for name, offset, _ in self.core.layout()}

    def masks(self, keys: bytes) -> np.ndarray:
        """bool[R, tokens]."""
        count = len(keys) // 16
        out = np.full((count, self.row_words), -1, np.int32)
        assert self.constraints.fill(keys, out.ctypes.data, self.row_words) == []
        bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
        assert not bits[:, len(self.words) :].any()
        return bits[:, : len(self.words)].astype(bool)

    def run(self, requests: list[dict[str, Any]], *, seed: int = 0, max_tokens: int = 400) -> list[list[Answer]]:
        """The answers of each request, given as keywords of `Constraints.add`."""
        draw = random.Random(seed)
        answers: list[list[Answer]] = []
        for request_id, request in enumerate(requests):
            n = request.get("n", 1)
            self.constraints.add(request_id, **{"n": n, **request})
            prompt = array("i", [draw.randrange(len(self.words))]).tobytes()
            self.core.submit(
                request_id, prompt, arrival_us=0, n=n, max_tokens=max_tokens, begins_text=True, constrained=True
            )
            answers.append([Answer("", [], 0, []) for _ in range(n)])
        while self.core.has_work():
            plan = self.core.plan()
            assert plan is not None
            keys = self.core.masked()
            masks = self.masks(keys)
            places = self.arenas[plan.arena][self.layout["mask_logits"] :][: plan.num_masks]
            assert len(masks) == plan.num_masks == plan.num_logits
            for mask, place, key in zip(masks, places, np.frombuffer(keys, np.int64).reshape(-1, 2), strict=True):
                allowed = np.nonzero(mask)[0].tolist()
                ends = [token for token in allowed if token in self.eos]
                others = [token for token in allowed if token not in self.eos]
                ending = not others or (ends and draw.random() < self.end)
                self.results[plan.arena][place] = draw.choice(ends if ending else others)
                answers[key[0]][key[1]].masks.append(len(allowed))
            self.take(self.core.commit(plan.step), answers)
        assert len(self.constraints) == 0
        return answers

    def take(self, frame: _core.StepOutput, answers: list[list[Answer]]) -> None:
        """Advance, and note what the frame says."""
        assert self.constraints.advance(frame) == []
        starts = [0, *np.frombuffer(frame.text_ends, np.int32)]
        request_ids = np.frombuffer(frame.request_ids, np.int64).tolist()
        samples, tokens, reasons = (
            np.frombuffer(part, np.int32).tolist()
            for part in (frame.sample_indices, frame.token_ids, frame.finish_reasons)
        )
        for event, request_id in enumerate(request_ids):
            answer = answers[request_id][samples[event]]
            answer.text += frame.text[starts[event] : starts[event + 1]].decode()
            answer.tokens.append(tokens[event])
            answer.finish_reason = reasons[event]
            if all(one.finish_reason for one in answers[request_id]):
                self.constraints.remove(request_id)
