"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_LOGPROBS
from octavo.server.apis.openai.sampling_fields import Count, SamplingFields
from octavo.server.request.decoding import REFUSED, doc, unsupported

__all__ = ["CompletionRequest"]

MAX_CHOICES = 1024  # of one request, prompts times n


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[str | list[str | int | list[int]] | None, doc("A text, token ids, or a list of either.")] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=-1, le=1 << 30)] | None,
        doc("Return log probabilities of the output's tokens and of this many likeliest ones."),
    ] = None
    echo: Annotated[
        bool | None, doc("Begin the output with the prompt; in chats with the assistant's last message.")
    ] = None
    max_tokens: Annotated[Count | None, doc("Maximum number of tokens of each choice. Default: 16.")] = None
    suffix: Annotated[str | None, REFUSED] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, doc("Number of candidates to generate. The likeliest are returned.")
    ] = None

    def check(self) -> None:
        """Refuse what contradicts itself or is not supported."""
        super().check()
        if self.suffix:
            raise unsupported("suffix", self.suffix, "fill-in-the-middle is not available")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"logprobs: Requested sample logprobs of {self.logprobs}, which is greater than max allowed: "
                f"{MAX_LOGPROBS}",
                "logprobs",
            )
        if self.best_of and self.best_of < (self.n or 1):
            raise InvalidRequest(f"best_of: {self.best_of} is less than n ({self.n or 1})", "best_of")
        if self.stream and self.num_candidates > (self.n or 1):
            raise InvalidRequest("best_of: candidates beyond n cannot be streamed; remove the field", "best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "echo: together with logprobs it requires log probabilities of the prompt, which are not supported; "
                "remove one of the fields",
                "echo",
            )

    @property
    def num_candidates(self) -> int:
        """Number of completions generated for each prompt. The n best are returned."""
        return max(self.best_of or 0, self.n or 1)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, a text or its token ids each.

        Raises:
            InvalidRequest: none, too many, an empty one, or a list of mixed kinds.
        """
        given = self.prompt
        if given is None or isinstance(given, str):
            found: list[str | list[int]] = [given or ""]
        elif given and all(isinstance(item, int) for item in given):
            found = [[item for item in given if isinstance(item, int)]]
        else:
            found = [item for item in given if not isinstance(item, int)]
            if len(found) != len(given) or len({isinstance(item, str) for item in found}) > 1:
                raise InvalidRequest(
                    "prompt: strings, token ids and lists of token ids are mixed; use one kind", "prompt"
                )
        if not found or not all(found):
            raise InvalidRequest("prompt: empty; give a string or a list of token ids", "prompt")
        if len(found) * self.num_candidates > MAX_CHOICES:
            raise InvalidRequest(f"prompt: {len(found)} prompts ask for more than {MAX_CHOICES} completions", "prompt")
        return found
