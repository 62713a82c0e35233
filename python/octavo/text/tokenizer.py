"""The tokenizer of a served model. Uses `tokenizers` and jinja2; no torch, no transformers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from octavo import _core
from octavo.errors import CorruptFile, InvalidRequest, ModelNotFound
from octavo.text.chat_template import ChatTemplate
from octavo.text.token_bytes import TokenBytes, vocabulary_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.loading.resolve import ModelSource
    from octavo.text.parts import TokenizerParts

__all__ = ["Tokenizer", "load_tokenizer"]

_PROBE = "a 1\n\u00e9"
"""Encoded once at load: some contradictions in a tokenizer's file show only then."""


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The tokenizer among a model's files; None where there is none, so that the model takes token ids only.

    Raises:
        CorruptFile: one that cannot be read. UnsupportedModel: a kind not known.
    """
    try:
        parts = _read(source)
        if parts is not None:
            parts.backend.encode(_PROBE)
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise CorruptFile(f"{source.path}: the tokenizer cannot be used: {error}") from None
    return None if parts is None else Tokenizer(parts)


def _read(source: ModelSource) -> TokenizerParts | None:
    if source.kind == "gguf":
        from octavo.text.gguf_tokenizer import read_gguf_tokenizer

        return read_gguf_tokenizer(source.path)
    from octavo.text.folder_tokenizer import read_folder_tokenizer

    return read_folder_tokenizer(source.path)


def _is_panic(error: BaseException) -> bool:
    """Whether the tokenizers package broke down inside; its exception is no `Exception` and has no public name."""
    return type(error).__name__ == "PanicException"


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    Attributes:
        bos_token_id: the token that opens a text; None when there is none.
        eos_token_ids: the tokenizer's end tokens; unite them with `ModelConfig.eos_token_ids`.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self._special_tokens = parts.special_tokens
        self._chat_templates = parts.chat_templates
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def from_source(cls, source: ModelSource, override: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model.

        Args:
            source: the model's files.
            override: another folder, file or repository to take it from.

        Raises:
            ModelNotFound: no tokenizer there.
            CorruptFile: one that cannot be read.
            UnsupportedModel: a kind not known.
        """
        if override is not None:
            from octavo.loading.resolve import resolve_tokenizer

            source = resolve_tokenizer(override)
        tokenizer = load_tokenizer(source)
        if tokenizer is None:
            raise ModelNotFound(
                f"{source.path}: holds no tokenizer; the tokenizer setting can name a folder or repository with one"
            )
        return tokenizer

    @property
    def special_tokens(self) -> dict[str, str]:
        """The tokens that templates know by name: `bos_token`, `eos_token`, ..."""
        return dict(self._special_tokens)

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the model's usual chat template; None where it has none."""
        return self._chat_templates.get("default")

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return len(self.vocabulary.tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._chat_templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around one (often BOS) unless told otherwise.

        Raises:
            InvalidRequest: the text holds halves of characters (lone surrogates).
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"prompt: not valid Unicode text: {error}", "prompt") from error
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise InvalidRequest(f"prompt: the tokenizer failed on it: {error}", "prompt") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token given as the vocabulary spells it; None when there is none."""
        return self._backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text; see `ChatTemplate.render`.

        Args:
            messages: the conversation, each message with `role` and `content`.
            add_generation_prompt: end with what opens the assistant's answer.
            chat_template: jinja text to use instead of the model's own.
            tools: function descriptions; the model's template for tools is used where it has one.
            variables: anything else the template reads, and `ChatTemplate.render`'s other arguments.

        Raises:
            InvalidRequest: the model has no template, or it refuses the messages; the field is `messages`.
        """
        template = self._template(chat_template, tools=bool(tools))
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """Token ids of a conversation; arguments as `apply_chat_template`.

        The template writes all special tokens, so none are added.
        """
        return self.encode(self.apply_chat_template(messages, **arguments), add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; none where an id has no token."""
        tokens = self.vocabulary.tokens
        return tokens[token_id] if 0 <= token_id < len(tokens) else b""

    @functools.cached_property
    def vocabulary(self) -> TokenBytes:
        """Bytes and flags of every id."""
        return vocabulary_bytes(self._backend)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token; no text of n tokens is longer than n times as many characters."""
        return max(map(len, self.vocabulary.tokens), default=1)

    def token_table(self, vocab_size: int = 0) -> _core.TokenTable:
        """The table the core streams text with.

        Args:
            vocab_size: rows of the model's embedding: the table has as many ids. 0 takes the tokenizer's count.
        """
        table = self.vocabulary.resized(vocab_size) if vocab_size else self.vocabulary
        return _core.TokenTable(table.tokens, table.flags, drop_leading_space=table.drop_leading_space)

    def _template(self, source: str | None, *, tools: bool) -> ChatTemplate:
        if source is None:
            names = ("tool_use", "default") if tools else ("default",)
            source = next((self._chat_templates[name] for name in names if name in self._chat_templates), None)
        if source is None:
            raise InvalidRequest(
                "messages: this model has no chat template; use the completions endpoint, or give a template",
                "messages",
            )
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = ChatTemplate(source, self._special_tokens)
            if len(self._compiled) < 16:
                self._compiled[source] = compiled
        return compiled
