"""Limits of one request; each error names the setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.request.json_scan import scan
from octavo.server.settings import ServerSettings

__all__ = ["check_constraint", "check_json", "check_messages", "check_request"]


def _too_much(field: str | None, what: str, setting: str, limit: int) -> InvalidRequest:
    named = f"{field}: " if field else ""
    return InvalidRequest(f"{named}{what} more than this server allows; {setting} is {limit}", field)


def check_json(body: bytes, settings: ServerSettings) -> None:
    """Refuse a body whose objects and arrays are too deep or too many, before anything is made of it.

    Of a large body in a thread: it lets others run meanwhile.

    Raises:
        InvalidRequest.
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= settings.max_json_depth:
        return
    for containers, depth in scan(body):
        if containers > settings.max_json_containers:
            raise _too_much(
                None,
                f"The body's {containers} objects and arrays are",
                "max_json_containers",
                settings.max_json_containers,
            )
        if depth > settings.max_json_depth:
            raise _too_much(None, "The body is nested", "max_json_depth", settings.max_json_depth)


def check_messages(messages: Sequence[Any] | None, settings: ServerSettings) -> None:
    """Refuse a conversation of too many messages.

    Raises:
        InvalidRequest.
    """
    if messages is not None and len(messages) > settings.max_messages:
        raise _too_much("messages", f"{len(messages)} are", "max_messages", settings.max_messages)


def check_constraint(text: str, field: str, settings: ServerSettings) -> None:
    """Refuse a schema, pattern, grammar or list of choices that is too long to be compiled.

    Raises:
        InvalidRequest: naming `field`.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > settings.max_constraint_bytes:
        raise _too_much(field, f"{size} bytes are", "max_constraint_bytes", settings.max_constraint_bytes)


def check_request(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int, settings: ServerSettings
) -> None:
    """Refuse a request whose prompts, completions and parameters together are too much.

    Raises:
        InvalidRequest: naming the field.
    """
    completions = len(prompts) * params.n
    if completions > settings.max_answers:
        field = "n" if params.n > 1 else "prompt"
        raise _too_much(
            field, f"{len(prompts)} prompts with {params.n} completions each are", "max_answers", settings.max_answers
        )
    room = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    if completions * room > settings.max_answer_tokens:
        raise _too_much(
            "max_tokens",
            f"{completions} completions of up to {room} tokens are",
            "max_answer_tokens",
            settings.max_answer_tokens,
        )
    if len(params.stop) > settings.max_stops:
        raise _too_much("stop", f"{len(params.stop)} texts are", "max_stops", settings.max_stops)
    for text in params.stop:
        if len(text) > settings.max_stop_chars:
            raise _too_much("stop", f"a text of {len(text)} characters is", "max_stop_chars", settings.max_stop_chars)
    for field, setting, limit in (
        ("logit_bias", "max_logit_bias", settings.max_logit_bias),
        ("bad_words", "max_bad_words", settings.max_bad_words),
    ):
        entries = getattr(params, field, None)
        if entries is not None and len(entries) > limit:
            raise _too_much(field, f"{len(entries)} entries are", setting, limit)
