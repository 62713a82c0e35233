"""The request bodies of TGI's API, with its ranges, and their conversion to OpenAI's fields."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec

from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.sampling_params import MAX_N, SamplingParams
from octavo.server.apis.openai.completion_request import CompletionRequest
from octavo.server.models.model_handle import ModelHandle
from octavo.server.request.decoding import REFUSED, RequestBody, convert, doc
from octavo.server.request.field_renames import renamed_errors

__all__ = [
    "DEFAULT_MAX_NEW_TOKENS",
    "MAX_TOP_N_TOKENS",
    "GenerateBody",
    "GenerateParameters",
]

DEFAULT_MAX_NEW_TOKENS = 1024
MAX_TOP_N_TOKENS = 5

_NAMES = {
    "max_tokens": "max_new_tokens",
    "n": "best_of",
    "logprobs": "top_n_tokens",
    "guided_json": "grammar",
    "guided_regex": "grammar",
}


class Grammar(msgspec.Struct):
    """`grammar`."""

    type: str
    value: Annotated[Any, doc("The schema or the pattern.")] = None

    def check(self) -> None:
        """Refuse an invalid grammar.

        Raises:
            InvalidRequest: an unknown type, or a value of another type.
        """
        if self.type not in ("json", "json_object", "json_schema", "regex"):
            raise InvalidRequest(f"grammar: {ascii(self.type)[:60]} is not one of json, json_schema, regex", "grammar")
        if not isinstance(self.value, str if self.type == "regex" else str | dict) or not self.value:
            raise InvalidRequest(
                f"grammar: the value is not a {'string' if self.type == 'regex' else 'schema'}", "grammar"
            )

    @property
    def constraint(self) -> dict[str, Any]:
        """The field of OpenAI's requests, with its value."""
        if self.type == "regex":
            return {"guided_regex": self.value}
        named = self.type == "json_schema" and isinstance(self.value, dict) and "schema" in self.value
        return {"guided_json": self.value["schema"] if named else self.value}


class GenerateParameters(msgspec.Struct, kw_only=True):
    """`parameters`; each may be null."""

    best_of: Annotated[int | None, doc("Number of candidates to generate. The likeliest are returned.")] = None
    temperature: Annotated[
        float | None, doc("Higher is more varied. Without any sampling field the likeliest token is taken.")
    ] = None
    repetition_penalty: Annotated[
        float | None, doc("Above 1 makes tokens of the prompt and the output less likely.")
    ] = None
    frequency_penalty: Annotated[
        float | None, doc("Subtracted from a token's logit for each time it is in the output.")
    ] = None
    top_k: Annotated[int | None, doc("Keep the k likeliest tokens; -1 keeps all.")] = None
    top_p: Annotated[float | None, doc("Keep the likeliest tokens that make up this probability.")] = None
    typical_p: Annotated[float | None, REFUSED] = None
    do_sample: Annotated[bool | None, doc("Sample tokens; else the likeliest is taken.")] = None
    max_new_tokens: Annotated[int | None, doc("Maximum number of output tokens. Default: 1024.")] = None
    return_full_text: Annotated[bool | None, doc("Begin the output with the prompt.")] = None
    stop: Annotated[list[str] | None, doc("A text, or several, that end the output and are left out of it.")] = None
    truncate: Annotated[int | None, doc("Keep this many tokens at the end of the prompt.")] = None
    watermark: Annotated[bool | None, REFUSED] = None
    details: Annotated[bool | None, doc("Return the output's tokens and its finish reason.")] = None
    decoder_input_details: Annotated[bool | None, doc("Return the prompt's tokens too.")] = None
    seed: Annotated[int | None, doc("Makes the output reproducible.")] = None
    top_n_tokens: Annotated[int | None, doc("Number of likeliest tokens to return at each position.")] = None
    grammar: Annotated[Grammar | None, doc("Constrains the output to a JSON schema or a regular expression.")] = None
    adapter_id: Annotated[str | None, REFUSED] = None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled; without any sampling field TGI takes the likeliest."""
        return bool(self.do_sample) or not (
            self.temperature is None and self.top_k is None and self.top_p is None and self.typical_p is None
        )

    @property
    def num_candidates(self) -> int:
        """Number of candidates. The likeliest is returned."""
        return 1 if self.best_of is None else self.best_of

    def check(self) -> None:
        """Refuse what is out of TGI's ranges or not supported.

        Raises:
            InvalidRequest: naming the field.
        """
        if not 1 <= self.num_candidates <= MAX_N:
            raise InvalidRequest(f"best_of: {self.best_of} is not between 1 and {MAX_N}", "best_of")
        if self.num_candidates > 1 and not self.samples:
            raise InvalidRequest("best_of: values above 1 require sampling; set do_sample", "best_of")
        if self.num_candidates > 1 and self.seed is not None:
            raise InvalidRequest("seed: must not be set when best_of is above 1", "seed")
        for field in ("temperature", "repetition_penalty", "top_k", "max_new_tokens", "truncate"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise InvalidRequest(f"{field}: {value} is not above 0", field)
        for field in ("top_p", "typical_p"):
            value = getattr(self, field)
            if value is not None and not 0 < value < 1:
                raise InvalidRequest(
                    f"{field}: {value} is not between 0 and 1, both exclusive; remove the field for 1", field
                )
        if self.seed is not None and self.seed < 0:
            raise InvalidRequest(f"seed: {self.seed} is below 0", "seed")
        if not 0 <= (self.top_n_tokens or 0) <= MAX_TOP_N_TOKENS:
            raise InvalidRequest(
                f"top_n_tokens: {self.top_n_tokens} is not between 0 and {MAX_TOP_N_TOKENS}", "top_n_tokens"
            )
        for field in ("typical_p", "watermark", "adapter_id"):
            if getattr(self, field):
                raise InvalidRequest(f"{field}: not supported; remove the field", field)
        if self.grammar is not None:
            self.grammar.check()


class GenerateBody(RequestBody, kw_only=True):
    """The body of `POST /generate`, `/generate_stream` and `/`.

    TGI serves one model and has no field for it; `model` is for servers of several.
    """

    inputs: Annotated[str | None, doc("The text to continue.")] = None
    parameters: Annotated[GenerateParameters | None, doc("How to generate.")] = None
    stream: Annotated[bool | None, doc("Send the output as it is generated.")] = None
    model: Annotated[str | None, doc("A name that `/v1/models` lists. Default: the server's first.")] = None

    def check(self) -> None:
        """Refuse an empty input, and parameters out of range.

        Raises:
            InvalidRequest: naming the field.
        """
        if not self.inputs:
            raise InvalidRequest("inputs: the text is empty", "inputs")
        self.params.check()

    @property
    def params(self) -> GenerateParameters:
        """`parameters`, or none."""
        return self.parameters or GenerateParameters()

    def check_stream(self) -> None:
        """Refuse what cannot be streamed.

        Raises:
            InvalidRequest: naming the field.
        """
        if self.params.num_candidates > 1:
            raise InvalidRequest("best_of: must be 1 when streaming", "best_of")
        if self.params.decoder_input_details:
            raise InvalidRequest("decoder_input_details: is not available when streaming", "decoder_input_details")

    def room(self, model: ModelHandle, num_inputs: int) -> int:
        """Maximum number of output tokens after `num_inputs` tokens.

        Raises:
            ContextLengthExceeded: fewer than asked for.
        """
        asked, room = self.params.max_new_tokens, model.max_model_len - num_inputs
        if asked is not None and asked > room:
            raise ContextLengthExceeded(
                f"max_new_tokens: `inputs` tokens + `max_new_tokens` must be <= {model.max_model_len}, this model's "
                f"maximum context length. Given: {num_inputs} `inputs` tokens and {asked} `max_new_tokens`",
                "max_new_tokens",
            )
        return min(DEFAULT_MAX_NEW_TOKENS, room) if asked is None else asked

    def sampling_params(self, model: ModelHandle, num_inputs: int, *, logprobs: bool) -> SamplingParams:
        """The sampling parameters. TGI ignores the model's recommendations and keeps stop texts in the output.

        Raises:
            InvalidRequest: a value out of range.
        """
        given = self.params
        values: dict[str, Any] = {
            "max_tokens": self.room(model, num_inputs),
            "n": given.num_candidates,
            "stop": given.stop,
            "include_stop_str_in_output": True,
            "repetition_penalty": given.repetition_penalty,
            "frequency_penalty": given.frequency_penalty,
            "temperature": 0.0,
            "logprobs": given.top_n_tokens or 0 if logprobs or given.top_n_tokens else None,
        }
        if given.samples:
            # Drawn here, because the response contains it.
            seed = secrets.randbits(62) if given.seed is None else given.seed
            values |= {"temperature": given.temperature, "top_k": given.top_k, "top_p": given.top_p, "seed": seed}
        if given.grammar is not None:
            values |= given.grammar.constraint
        with renamed_errors(_NAMES):
            fields = convert(CompletionRequest, values)
            return fields.sampling_params(model, max_tokens=None, logprobs=fields.logprobs, defaults={})
