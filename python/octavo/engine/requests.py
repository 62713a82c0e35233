"""Checks of requests: the client validates and fills in defaults, the engine submits to the core."""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.engine.protocol import Constraint, Request, Submit
from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.runner.interface import ModelInfo
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo._core import Core
    from octavo.text.tokenizer import Tokenizer

__all__ = ["CheckedRequest", "RequestMaker", "read_request", "submissions", "submit_checked"]

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SamplingParams)
_MESSAGE_BYTES = 1 << 20
_GREEDY_BELOW = 1e-5
_MASK = (1 << 64) - 1


class CheckedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that passed the client's checks, with its defaults filled in.

    Attributes:
        request_id: chosen by the client, never used twice.
        prompt: int32 token ids.
        params: the caller's own, never changed here; the fields below stand in for those of the same names.
        constraint: what `params` say of single tokens, as the engine's half takes it.
    """

    request_id: int
    prompt: bytes
    params: SamplingParams
    seed: int
    max_tokens: int
    min_tokens: int
    temperature: float
    constraint: Constraint | None = None

    def to_send(self) -> Request:
        """The request as a message to the engine's process."""
        # A plain copy: `replace` would repeat the checks.
        filled = copy.copy(self.params)
        filled.seed, filled.max_tokens = self.seed, self.max_tokens
        filled.min_tokens, filled.temperature = self.min_tokens, self.temperature
        if self.constraint is not None:
            filled.structured_outputs, filled.allowed_token_ids, filled.bad_words = None, None, []
        return Request(self.request_id, self.prompt, msgspec.Raw(_ENCODER.encode(filled)), self.constraint)


class RequestMaker:
    """Checks requests and fills in defaults, in the client. Lives as long as the engine.

    The i-th request without a seed gets a hash of the engine's seed and i, so the same requests in the same order give
    the same output, at any temperature.

    Args:
        info: the model's limits.
        seed: the engine's.
        tokenizer: the model's, for texts that may not come out.
    """

    def __init__(self, info: ModelInfo, seed: int, tokenizer: Tokenizer | None = None) -> None:
        self._info = info
        self._seed = seed
        self._tokenizer = tokenizer
        self._drawn = 0
        self._last_constraint: Constraint | None = None

    def defaults(self, max_tokens: int | None = 16) -> SamplingParams:
        """Default parameters: those that the model's makers recommend.

        Args:
            max_tokens: as of `SamplingParams`.

        Raises:
            InvalidRequest: the model's files recommend what is out of range.
        """
        recommended: dict[str, Any] = self._info.sampling_defaults
        return SamplingParams(**recommended, max_tokens=max_tokens)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """The constraint on single tokens. It tokenizes texts, so call it in a thread.

        Raises:
            InvalidRequest: parameters out of range or unsupported by the model.
        """
        params.validate()
        if not params.is_constrained:
            return None
        allowed, vocab_size = params.allowed_token_ids, self._info.vocab_size
        if allowed is not None and max(allowed) >= vocab_size:
            raise InvalidRequest(
                f"allowed_token_ids: {max(allowed)} is outside the vocabulary; ids go from 0 to {vocab_size - 1}",
                "allowed_token_ids",
            )
        return Constraint(_grammar(params), allowed, self._bad_words(params.bad_words) if params.bad_words else [])

    def _bad_words(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each text, at the beginning of the output and after other words."""
        if self._tokenizer is None:
            raise InvalidRequest("bad_words: the model has no tokenizer; ban tokens by logit_bias", "bad_words")
        sequences: dict[tuple[int, ...], None] = {}
        for text in texts:
            word = text.lstrip()
            for spelled in (word, f" {word}"):
                sequences[tuple(self._tokenizer.encode(spelled, add_special_tokens=False))] = None
        # A model never samples an id that its embedding has no row for.
        return [list(ids) for ids in sequences if ids and max(ids) < self._info.vocab_size]

    def make(
        self, request_id: int, prompt: Sequence[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> Request:
        """A request that the engine accepts, unless its KV cache is too small.

        max_tokens is limited to the rest of the context, so output that reaches its end finishes with "length".

        Args:
            request_id: as of `CheckedRequest`.
            prompt: token ids.
            params: what the caller asks for.
            constraint: of `params`, where it was made before.

        Raises:
            InvalidRequest: empty prompt, an id outside the vocabulary, parameters out of range.
            ContextLengthExceeded: no room for one token after the prompt.
        """
        return self.check(request_id, prompt, params, constraint=constraint).to_send()

    def check(
        self,
        request_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        same_params: bool = False,
        constraint: Constraint | None = None,
    ) -> CheckedRequest:
        """Make a request for an engine in this process, without encoding; see `make`.

        Args:
            request_id: as of `CheckedRequest`.
            prompt: token ids.
            params: what the caller asks for.
            same_params: the last request's were the same object, so their ranges need no second look.
            constraint: of `params`, where it was made before.

        Raises:
            InvalidRequest, ContextLengthExceeded: as `make`.
        """
        ids = self._check_prompt(prompt)
        if not same_params:
            self._last_constraint = self.constraint(params) if constraint is None else constraint
        room = self._info.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return CheckedRequest(
            request_id,
            ids.tobytes(),
            params,
            self._draw_seed() if params.seed is None else params.seed,
            max_tokens,
            min(params.min_tokens, max_tokens),
            params.temperature if params.temperature >= _GREEDY_BELOW else 0.0,
            self._last_constraint,
        )

    def _check_prompt(self, prompt: Sequence[int]) -> array[int]:
        """The token ids of the prompt as int32."""
        limit, vocab_size = self._info.max_model_len, self._info.vocab_size
        try:
            # Python converts to unsigned numbers four times as fast as to signed ones.
            ids = array("I", prompt)
        except TypeError as error:
            raise InvalidRequest(
                f"prompt: is not a list of token ids ({error}); give whole numbers", "prompt"
            ) from None
        except OverflowError:
            ids = None
        if ids is None or (ids and np.frombuffer(ids, np.uint32).max() >= vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            name = "" if self._tokenizer is None else self._tokenizer.token_bytes(wrong).decode("utf-8", "replace")
            raise InvalidRequest(
                f"prompt: token id {wrong}{f' ({name!r})' if name else ''} is outside the vocabulary; ids go from 0 to "
                f"{vocab_size - 1}",
                "prompt",
            )
        if not ids:
            raise InvalidRequest("prompt: is empty; give one token or more", "prompt")
        if len(ids) >= limit:
            raise ContextLengthExceeded(
                f"prompt: {len(ids)} tokens leave no room for an answer in the model's context of {limit} tokens; "
                f"shorten it to {limit - 1} or fewer",
                "prompt",
            )
        return ids

    def _draw_seed(self) -> int:
        """The next seed: one step of SplitMix64, as a signed 64-bit number."""
        self._drawn += 1
        z = (self._seed + self._drawn * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
        return z - (1 << 64) if z >> 63 else z


def submissions(requests: Sequence[Request], *, batch: bool = False) -> Iterator[Submit]:
    """Requests in order, as messages that fit a frame."""
    chunk: list[Request] = []
    size = 0
    for request in requests:
        if size > _MESSAGE_BYTES:
            yield Submit(chunk, batch=batch, more=True)
            chunk, size = [], 0
        chunk.append(request)
        size += len(request.prompt) + len(request.params)
    if chunk:
        yield Submit(chunk, batch=batch)


def read_request(request: Request, core_id: int | None = None) -> CheckedRequest:
    """A request as its client sent it, decoded in the engine.

    Args:
        request: what came.
        core_id: the core's id of it where that is not the client's.

    Raises:
        InvalidRequest: its parameters are none.
    """
    try:
        params = _DECODER.decode(request.params)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"sampling parameters: {error}") from None
    if params.max_tokens is None or params.seed is None:
        raise InvalidRequest("sampling parameters: max_tokens and seed must be filled in before a request is submitted")
    return CheckedRequest(
        request.request_id if core_id is None else core_id,
        request.prompt,
        params,
        params.seed,
        params.max_tokens,
        params.min_tokens,
        params.temperature,
        request.constraint,
    )


def _grammar(params: SamplingParams) -> tuple[str, str] | None:
    """Kind and text of the constraint on the whole output, as the engine compiles it."""
    if params.structured_outputs is None:
        return None
    ((kind, value),) = params.structured_outputs.items()
    if kind == "json_object":
        return kind, ""
    if isinstance(value, str):
        return kind, value
    try:
        return kind, json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs: the schema is not JSON ({error})", "structured_outputs") from None


def submit_checked(core: Core, request: CheckedRequest, arrival_us: int) -> None:
    """Queue a request in the core.

    Raises:
        InvalidRequest, ContextLengthExceeded, CapacityExceeded: the request is not queued.
    """
    params = request.params
    core.submit(
        request.request_id,
        request.prompt,
        arrival_us=arrival_us,
        n=params.n,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        # The core takes no top_p of 0, which leaves one token: so does a top_k of 1.
        top_p=params.top_p or 1.0,
        top_k=max(params.top_k, 0) if params.top_p else 1,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=request.seed & _MASK,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        stop_token_ids=params.stop_token_ids,
        stop=[text.encode() for text in params.stop],
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        # A constrained value is the whole text: grammars pass over the same space.
        begins_text=params.begins_text or (request.constraint is not None and request.constraint.grammar is not None),
        priority=params.priority,
        cache_salt=params.cache_salt.encode(),
        logit_bias=list(params.logit_bias.items()) if params.logit_bias else [],
        constrained=request.constraint is not None,
    )
