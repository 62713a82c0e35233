"""Chat templates: a conversation as the text a model was trained on.

Templates come with models, so they are untrusted: they run in jinja's immutable sandbox, see plain data only,
and are bounded in size, in what they may write and in how long they may run.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes

from octavo.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jinja2.parser import Parser

__all__ = ["ChatTemplate"]

_TEMPLATE_LIMIT = 1 << 20
_OUTPUT_LIMIT = 64 << 20
"""Characters of a template, and characters (or entries) it may write or make by repetition."""

_INTEGER_BITS = 4096
_SIZED = (str, list, tuple)

_WIDTH_LIMIT = 1 << 20
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|[0-9]{7})")
_WIDE_BRACES = re.compile(r":[^{}]*(?:\{|[0-9]{7})")
"""Widths that texts are padded to, at most; formats that name more, or take it from an argument."""

_SECONDS_LIMIT = 10.0
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which callers pass an assistant's reasoning; templates read the first two."""


class _TemplateError(Exception):
    """The error of a template's `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which mark assistant text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            source: jinja text.
            special_tokens: what templates know as `bos_token`, `eos_token`, ...

        Raises:
            UnsupportedModel: not valid jinja, or too long.
        """
        if len(source) > _TEMPLATE_LIMIT:
            raise UnsupportedModel(f"chat template: {len(source)} characters are too many")
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._environment = _environment()
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnsupportedModel(f"chat template: not valid jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Write a conversation as text.

        Args:
            messages: each with `role` and `content` (text, or a list of parts of type `text`).
            add_generation_prompt: end with what opens the assistant's answer.
            tools: function descriptions, for templates that know them.
            documents: for templates that know them.
            continue_final_message: end the text where the template wrote the end of the last message's content, so
                that the model continues the message. The content may be empty.
            variables: anything else the template reads, such as `enable_thinking`.

        Raises:
            InvalidRequest: messages of another form, or ones the template refuses; the field is `messages`. The
                template does not write the message to continue; the field is `continue_final_message`.
        """
        plain = [_message(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            return self._render_begun(plain, tools=tools, documents=documents, **variables)
        context = {
            **self._special_tokens,
            **{key: _plain(value) for key, value in variables.items()},
            "messages": plain,
            "tools": _plain(tools) if tools else None,
            "documents": _plain(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._environment.render(self._template, context)
        except _TemplateError as error:
            raise InvalidRequest(f"messages: the chat template refuses them: {error}", "messages") from error
        except Exception as error:  # a template can raise whatever Python can
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"messages: the chat template failed on them: {reason}", "messages") from error

    def _render_begun(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        """Render with a mark after the last message's content, and cut at the mark."""
        if not messages:
            raise InvalidRequest("continue_final_message: there is no message to continue", "continue_final_message")
        final = messages[-1]
        content = final.get("content") or ""
        mark = f"END{secrets.token_hex(16)}"
        # The blank after the mark is missing from the text where the template trims the content.
        marked = [*messages[:-1], {**final, "content": f"{content}{mark} "}]
        text = self.render(marked, add_generation_prompt=False, **arguments)
        before, found, after = text.rpartition(mark)
        if not found:
            raise InvalidRequest(
                "continue_final_message: the chat template does not write the last message's content; "
                "set the field to false",
                "continue_final_message",
            )
        blanks = content[len(content.rstrip()) :]
        trimmed = bool(content.strip()) and not after.startswith(" ")
        return before.removesuffix(blanks) if trimmed else before


def _message(message: Any, index: int) -> dict[str, Any]:
    """A message as plain data, without nulls, its text parts joined."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where}: an object with role and content is expected", "messages")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f"{where}.role: {message.get('role')!r} is not a role; use user, assistant or system", "messages"
        )
    plain: dict[str, Any] = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = _join_parts(content, where)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content: {type(content).__name__} is neither text nor a list of parts", "messages"
        )
    return plain


def _join_parts(parts: list[Any], where: str) -> str:
    """Text of content parts; a line a part, as there is no telling what joins them."""
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"{where}.content[{number}]: parts of type {kind!r} are not supported; this model reads text",
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(value: Any) -> Any:
    """Data without methods a template could misuse."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise InvalidRequest(f"messages: a {type(value).__name__} is no JSON value", "messages")


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    del environment.globals["lipsum"]  # as much text as it is asked for
    environment.filters["tojson"] = _to_json
    for name in ("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "truncate", "wordwrap"):
        environment.filters[name] = _bounded_filter(name, environment.filters[name])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with ways to run or repeat without end closed."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._render = threading.local()

    def render(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        """A template's text.

        Raises:
            SecurityError: it runs or writes past the limits. Others: whatever the template raises.
        """
        self._render.deadline = time.monotonic() + _SECONDS_LIMIT
        pieces: list[str] = []
        length = 0
        for piece in template.generate(context):
            length += len(piece)
            if length > _OUTPUT_LIMIT:
                raise jinja2.exceptions.SecurityError("it writes too much")
            pieces.append(piece)
        return "".join(pieces)

    def check_time(self) -> None:
        """Called by every turn of every loop and by every call of a macro."""
        if time.monotonic() > self._render.deadline:
            raise jinja2.exceptions.SecurityError("it runs too long")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        # Macros too: two that call each other twice run longer than any loop.
        blocks: Iterable[Any] = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for block in blocks:
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(check).set_lineno(block.lineno))
        bounded: nodes.Template = _BoundedConcat().visit(tree)
        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse sums and products of a size no template needs."""
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not available to templates")
        if operator == "+":
            if isinstance(left, _SIZED) and isinstance(right, _SIZED):
                _check_length(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str) and _WIDE_PERCENT.search(left):
                raise jinja2.exceptions.SecurityError("it pads too much")
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _INTEGER_BITS:
                raise jinja2.exceptions.SecurityError("it multiplies too much")
        else:
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, _SIZED) and isinstance(count, int):
                    _check_length(len(sequence) * count)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse calls that pad or repeat to a size no template needs, such as a text's `center` and `replace`."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            _check_text_call(getattr(function, "__name__", ""), text, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Format a value; very large widths are refused."""
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _check_format(text)
        return super().wrap_str_format(value)

    def concatenate(self, *parts: Any) -> str:
        """The operator `~`."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)


class _BoundedConcat(jinja2.visitor.NodeTransformer):
    """Sends `~`, which jinja compiles to a plain join, through the sandbox."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the name says the kind of node
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("concatenate")
        return nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


def _check_length(length: int) -> None:
    if length > _OUTPUT_LIMIT:
        raise jinja2.exceptions.SecurityError("it repeats too much")


def _check_text_call(name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a text's method, or the filter of that name, whose result would be too long."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _WIDTH_LIMIT:
            raise jinja2.exceptions.SecurityError("it pads too much")
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_length(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], _SIZED):
        _check_length(len(text) * len(args[0]))
    elif name == "expandtabs":
        _check_length(len(text) + text.count("\t") * int(args[0] if args else 8))


def _check_format(text: str) -> None:
    if _WIDE_BRACES.search(text):
        raise jinja2.exceptions.SecurityError("it pads too much")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what it would make too long."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # The value comes after what jinja passes of its own.
        rest = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if rest:
            text = rest[0] if isinstance(rest[0], str) else ""
            if name == "join" and len(rest) > 1 and isinstance(rest[1], str) and isinstance(rest[0], _SIZED):
                _check_length(len(rest[0]) * len(rest[1]))
            else:
                _check_text_call(name, text, rest[1:], kwargs)
            if name == "format" and _WIDE_PERCENT.search(text):
                raise jinja2.exceptions.SecurityError("it pads too much")
        return function(*args, **kwargs)

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
