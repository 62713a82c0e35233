"""Runners without a model: for what the host costs alone, for leaks, for tests of what stands before an engine."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from octavo._core import NUM_ARENAS, PARAM_LEN
from octavo.errors import ConfigError
from octavo.runner.interface import ModelInfo, StepResult, mask_words

if TYPE_CHECKING:
    from octavo._core import Core, StepPlan

__all__ = ["FakeHandle", "FakeOptions", "FakeRunner", "FakeTextRunner", "fake_model_info"]

_TOKEN_FACTOR = np.uint32(2654435761)
_POSITION_FACTOR = np.uint32(2246822519)
_SHIFT = np.uint32(15)
_TEMPERATURE, _SEED, _SAMPLE_INDEX, _FLAGS, _NUM_LOGPROBS, _PROMPT_LENGTH = 0, slice(7, 9), 9, 10, 11, 12
_WANTS_LOGPROBS = 2
_LOG_HALF = math.log(0.5)
_CLOSERS = tuple(b'"}],:')
"""What brings JSON to its end, a string's first, as all others may be in one: a byte's token of `fake_tokenizer` is the
byte."""

_HELD_TOKENS = 32
"""A masked answer of text looks for its end after so many tokens."""


def fake_model_info(
    *,
    vocab_size: int = 32000,
    num_blocks: int = 4096,
    block_size: int = 16,
    max_model_len: int = 4096,
    max_num_seqs: int = 256,
) -> ModelInfo:
    """The model of a fake runner."""
    return ModelInfo(
        name="fake",
        architecture="Fake",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        dtype="float32",
        device="cpu",
        weights_bytes=0,
        kv_bytes=0,
    )


class FakeOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Behavior of a fake model, written after its name: `fake?step_ms=5&end_after=100`.

    Attributes:
        step_ms: milliseconds a step takes.
        end_after: tokens of an answer, the end token included, or a few more where a character goes on; 0 for no end.
        load_ms: milliseconds that loading takes.
        fail_at: the step, counted from 0, at which the device fails; -1 for none.
    """

    step_ms: float = 0.0
    end_after: int = 0
    load_ms: float = 0.0
    fail_at: int = -1

    @classmethod
    def of(cls, model: str) -> FakeOptions:
        """The options in a model's name.

        Raises:
            ConfigError: an option that does not exist, or a value that is none.
        """
        pairs = [item.partition("=") for item in model.partition("?")[2].split("&") if item]
        try:
            options = msgspec.convert({name: value for name, _, value in pairs}, cls, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"model: {model!r} is no fake model ({error}); its options are {known}") from None
        if not (0 <= options.step_ms < 1e6 and 0 <= options.load_ms < 1e6 and options.end_after >= 0):
            raise ConfigError(f"model: {model!r} has an option out of range; use 0 or more, and less than 1000 s")
        return options


class _Constrained:
    """What a step's rows may choose of: a token each, as far as it can be the one that a runner wants.

    A runner's logits are taken to lie so close together that any bias decides: a row chooses among the tokens that it
    may have and that have the largest bias.

    Args:
        plan: of the step.
        arrays: the plan's, by name.
        masks: int32 [>= num_masks, words].
        vocab_size: of the logits.
    """

    def __init__(
        self,
        plan: StepPlan,
        arrays: dict[str, npt.NDArray[np.int32]],
        masks: npt.NDArray[np.int32],
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self.masks = {int(row): masks[index] for index, row in enumerate(arrays["mask_logits"][: plan.num_masks])}
        count = plan.num_biases
        self._bias_rows: npt.NDArray[np.int32] = arrays["bias_logits"][:count]
        self._bias_tokens = arrays["bias_tokens"][:count]
        self._bias_values = arrays["bias_values"][:count].view(np.float32)

    def banned(self, token: int) -> list[int]:
        """The rows that a bias forbids a token."""
        return [int(row) for row in self._bias_rows[(self._bias_tokens == token) & np.isneginf(self._bias_values)]]

    def rows(self) -> list[int]:
        """The rows that are not free, rising."""
        return sorted({*self.masks, *self._bias_rows.tolist()})

    def candidates(self, row: int) -> npt.NDArray[np.int64]:
        """The tokens that a row chooses among, rising; the lowest of all where it is left nothing."""
        values = np.zeros(self._vocab_size, dtype=np.float32)
        if (mask := self.masks.get(row)) is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size]
            values[bits == 0] = -np.inf
        mine = self._bias_rows == row
        values[self._bias_tokens[mine]] += self._bias_values[mine]
        best = values.max()
        return np.flatnonzero(values == best) if best > -np.inf else np.zeros(1, dtype=np.int64)


class FakeHandle:
    """A step that was over as soon as it was launched, or is over at a time of `time.monotonic`."""

    __slots__ = ("_over_at", "_result")

    def __init__(self, result: StepResult, over_at: float = 0.0) -> None:
        self._result = result
        self._over_at = over_at

    def result(self) -> StepResult:
        """The step's samples."""
        if self._over_at and (left := self._over_at - time.monotonic()) > 0:
            time.sleep(left)
        return self._result


def _masks(rows: int, vocab_size: int) -> list[npt.NDArray[np.int32]]:
    return [np.zeros((rows, mask_words(vocab_size)), dtype=np.int32) for _ in range(NUM_ARENAS)]


def _choose(candidates: npt.NDArray[np.int64], wanted: int, preferred: Sequence[int], hashed: int) -> int:
    """A token of a row's candidates: the one that is wanted, else the first that is preferred, else any."""
    for token in (wanted, *preferred):
        place = int(np.searchsorted(candidates, token))
        if place < candidates.size and candidates[place] == token:
            return token
    return int(candidates[hashed % candidates.size])


class FakeRunner:
    """Samples a hash of the last token and its position: equal prompts get equal answers in any batch.

    A row that must not have that token gets an end token where it may, or else a hashed one of those that it may have.

    Args:
        info: vocabulary size and limits to go by.

    Attributes:
        num_steps: steps launched.
        arenas: int32 plan arenas, once attached.
        results: int32 result buffers, one an arena.
        masks: as of `Runner`, once attached.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.num_steps = 0
        self.masks: list[npt.NDArray[np.int32]] = []
        self.arenas: list[npt.NDArray[np.int32]] = []
        self.results: list[npt.NDArray[np.int32]] = []
        self._views: list[dict[str, npt.NDArray[np.int32]]] = []
        self._last_token = np.zeros(0, dtype=np.int32)

    def attach(self, core: Core) -> None:
        """Allocate the arenas and result buffers and hand them to `core`."""
        layout = core.layout()
        sizes = {name: size for name, _, size in layout}
        self.arenas = [np.zeros(core.arena_len(), dtype=np.int32) for _ in range(NUM_ARENAS)]
        self.results = [np.zeros(sizes["logits_rows"], dtype=np.int32) for _ in range(NUM_ARENAS)]
        self.masks = _masks(sizes["rows"], self.info.vocab_size)
        self._views = [{name: arena[offset : offset + size] for name, offset, size in layout} for arena in self.arenas]
        self._last_token = np.zeros(sizes["rows"], dtype=np.int32)
        core.attach(
            [(arena.ctypes.data, arena.size) for arena in self.arenas],
            [(result.ctypes.data, result.size) for result in self.results],
            self,
        )

    def launch(self, plan: StepPlan) -> FakeHandle:
        """Sample at once."""
        self.num_steps += 1
        num_logits = plan.num_logits
        view = self._views[plan.arena]
        num_decode_rows = plan.num_decode_rows
        decoded = view["token_ids"][:num_decode_rows]
        np.copyto(decoded, self._last_token[view["rows"][:num_decode_rows]], where=decoded < 0)
        logits_rows = view["logits_rows"][:num_logits]
        mixed = view["token_ids"][logits_rows].astype(np.uint32) * _TOKEN_FACTOR
        mixed ^= view["positions"][logits_rows].astype(np.uint32) * _POSITION_FACTOR
        mixed ^= mixed >> _SHIFT
        mixed *= _POSITION_FACTOR
        mixed ^= mixed >> _SHIFT
        sampled = (mixed % np.uint32(self.info.vocab_size)).astype(np.int32)
        if plan.num_masks or plan.num_biases:
            held = _Constrained(plan, view, self.masks[plan.arena], self.info.vocab_size)
            for row in held.rows():
                sampled[row] = _choose(
                    held.candidates(row), int(sampled[row]), self.info.eos_token_ids, int(mixed[row])
                )
        self.results[plan.arena][:num_logits] = sampled
        self._last_token[view["logits_slots"][:num_logits]] = sampled
        return FakeHandle(StepResult(num_logits))

    def close(self) -> None:
        """Nothing is held."""


class FakeTextRunner:
    """Writes a passage: equal prompts get equal answers in any batch, at any chunking, after preemption.

    Where in the passage an answer begins is a hash of its prompt and, at a temperature, of seed and answer's index.

    A row that must not have the passage's next token gets a hashed one of those that it may have; or, where its mask
    leaves few or lets it not end though it is long enough, the end token, or what closes JSON.

    Attributes:
        masks: as of `Runner`, once attached.

    Args:
        info: what the model claims to be.
        passage: (token id, its bytes), repeated without end.
        end_token: what ends an answer.
        options: how it behaves.
    """

    def __init__(
        self, info: ModelInfo, passage: Sequence[tuple[int, bytes]], end_token: int, options: FakeOptions
    ) -> None:
        self.info = info
        self.num_steps = 0
        self.masks: list[npt.NDArray[np.int32]] = []
        self._passage = np.array([token for token, _ in passage], dtype=np.int32)
        self._starts = [place for place, (_, text) in enumerate(passage) if text.startswith(b" ")]
        # Bytes 0x80 to 0xBF go on with a character.
        self._may_end = np.array([text[0] & 0xC0 != 0x80 for _, text in passage])
        self._end_token = end_token
        self._options = options
        self._arenas: list[npt.NDArray[np.int32]] = []
        self._results: list[npt.NDArray[np.int32]] = []
        self._views: list[dict[str, npt.NDArray[np.int32]]] = []
        self._history: Callable[[int], bytes] = lambda _slot: b""
        # Of every slot: its answer's start in the passage less its prompt's length, that length, and log probabilities.
        self._origin = np.zeros(0, dtype=np.int64)
        self._prompt_length = np.zeros(0, dtype=np.int64)
        self._num_logprobs = np.zeros(0, dtype=np.int32)
        self._any_logprobs = False

    def attach(self, core: Core) -> None:
        """As `Runner.attach`."""
        layout = core.layout()
        sizes = {name: size for name, _, size in layout}
        self._arenas = [np.zeros(core.arena_len(), dtype=np.int32) for _ in range(NUM_ARENAS)]
        self._results = [np.zeros(sizes["logits_rows"], dtype=np.int32) for _ in range(NUM_ARENAS)]
        self._views = [{name: arena[offset : offset + size] for name, offset, size in layout} for arena in self._arenas]
        self.masks = _masks(sizes["rows"], self.info.vocab_size)
        self._origin = np.zeros(sizes["rows"], dtype=np.int64)
        self._prompt_length = np.zeros(sizes["rows"], dtype=np.int64)
        self._num_logprobs = np.full(sizes["rows"], -1, dtype=np.int32)
        self._history = core.history
        core.attach(
            [(arena.ctypes.data, arena.size) for arena in self._arenas],
            [(result.ctypes.data, result.size) for result in self._results],
            self,
        )

    def launch(self, plan: StepPlan) -> FakeHandle:
        """Write each row's next token of the passage."""
        if self.num_steps == self._options.fail_at:
            raise RuntimeError(f"the fake device failed at step {self.num_steps}, as it was told to")
        self.num_steps += 1
        over_at = time.monotonic() + self._options.step_ms / 1e3 if self._options.step_ms else 0.0
        arrays = self._views[plan.arena]
        if plan.num_param_updates:
            self._update_params(plan.num_param_updates, arrays)
        count = plan.num_logits
        slots = arrays["logits_slots"][:count]
        positions = arrays["positions"][arrays["logits_rows"][:count]]
        places = (self._origin[slots] + positions + 1) % self._passage.size
        tokens = self._passage[places]
        held = _Constrained(plan, arrays, self.masks[plan.arena], self.info.vocab_size)
        if self._options.end_after:
            ends = positions + 2 - self._prompt_length[slots] >= self._options.end_after
            ends &= self._may_end[places]
            ends[held.banned(self._end_token)] = False
            tokens[ends] = self._end_token
        for row in held.rows():
            written = int(positions[row] + 1 - self._prompt_length[slots[row]])
            tokens[row] = self._held_token(held, row, int(tokens[row]), written)
        self._results[plan.arena][:count] = tokens
        result = StepResult(count)
        if self._any_logprobs and count:
            self._add_logprobs(result, slots, tokens)
        return FakeHandle(result, over_at)

    def close(self) -> None:
        """Nothing is held."""

    def _held_token(self, held: _Constrained, row: int, wanted: int, written: int) -> int:
        """The token of a row that is not free.

        Args:
            held: what it may choose of.
            row: its place among the step's samples.
            wanted: what it would write.
            written: tokens of its answer so far.
        """
        candidates = held.candidates(row)
        preferred: tuple[int, ...] = ()
        if row in held.masks:
            if written >= _HELD_TOKENS and self._end_token not in candidates:
                wanted = self._end_token
            # Where most tokens may be had, the one that may not is a word that is banned.
            if wanted == self._end_token or 2 * candidates.size < self.info.vocab_size:
                preferred = (self._end_token, *_CLOSERS)
        return _choose(candidates, wanted, preferred, zlib.crc32(f"{wanted} {written}".encode()))

    def _update_params(self, count: int, arrays: dict[str, npt.NDArray[np.int32]]) -> None:
        slots = arrays["param_slots"][:count].tolist()
        values = arrays["param_values"][: count * PARAM_LEN].reshape(count, PARAM_LEN)
        for slot, row in zip(slots, values, strict=True):
            prompt_length = int(row[_PROMPT_LENGTH])
            start = zlib.crc32(memoryview(self._history(slot))[: 4 * prompt_length])
            if row[_TEMPERATURE]:
                start = zlib.crc32(row[_SEED].tobytes() + row[_SAMPLE_INDEX].tobytes(), start)
            self._origin[slot] = self._starts[start % len(self._starts)] - prompt_length
            self._prompt_length[slot] = prompt_length
            self._num_logprobs[slot] = row[_NUM_LOGPROBS] if row[_FLAGS] & _WANTS_LOGPROBS else -1
        self._any_logprobs = bool((self._num_logprobs >= 0).any())

    def _add_logprobs(self, result: StepResult, slots: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]) -> None:
        """The chosen token has probability 1/2, the next id 1/4, and so on."""
        width = int(self._num_logprobs[slots].max())
        if width < 0:
            return
        result.logprobs = np.full(tokens.size, _LOG_HALF, dtype=np.float32)
        places = np.arange(width, dtype=np.int32)
        result.top_ids = (tokens[:, None] + places) % np.int32(self.info.vocab_size)
        result.top_logprobs = np.broadcast_to(
            ((places + 1) * _LOG_HALF).astype(np.float32), (tokens.size, width)
        ).copy()
