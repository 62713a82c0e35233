"""Constraints of the output: one schema, pattern, choice or grammar, under the names of several servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec

from octavo.errors import InvalidRequest
from octavo.server.request.decoding import REFUSED, doc

__all__ = [
    "Constraint",
    "JsonSchema",
    "ResponseFormat",
    "StructuredOutputs",
    "constraint_field",
    "output_constraint",
    "specification",
]

MAX_NESTING = 64
MAX_PATTERN = 1 << 16
# What no setting allows more of: reading a text holds up all requests.
MAX_SCHEMA = 1 << 18
# Fields of a constraint each, and its kind: vLLM's of old, llama.cpp's, SGLang's.
_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
_OPTIONS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace")


class JsonSchema(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: Annotated[dict[str, Any] | None, doc("A JSON schema.")] = None
    strict: Annotated[bool | None, doc("Ignored: schemas are always enforced.")] = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    json_schema: Annotated[JsonSchema | None, doc("Constrains the output; use one such field. A JSON schema.")] = None
    schema: Annotated[dict[str, Any] | None, doc("A JSON schema.")] = None  # llama.cpp's
    value: Annotated[Any, doc("The schema or the pattern.")] = None  # TGI's, of json and regex


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`: exactly one of them."""

    json: Annotated[Any, doc("The output satisfies this JSON schema.")] = None
    regex: Annotated[str | None, doc("The whole output matches this regular expression.")] = None
    choice: Annotated[list[str] | None, doc("The output is one of these texts.")] = None
    grammar: Annotated[str | None, doc("The output follows this grammar: Lark, or GBNF with a rule `root ::=`.")] = None
    json_object: Annotated[bool | None, doc("The output is a JSON object.")] = None
    structural_tag: Annotated[Any, REFUSED] = None
    whitespace_pattern: Annotated[str | None, REFUSED] = None
    disable_any_whitespace: Annotated[bool | None, REFUSED] = None
    disable_additional_properties: Annotated[
        bool | None, doc("Ignored: objects have only the schema's properties, unless the schema allows others.")
    ] = None


class Constraint(msgspec.Struct, frozen=True):
    """A constraint of the output.

    Attributes:
        field: the request's field that asks for it.
        kind: in a word.
        spec: as `SamplingParams.structured_outputs`.
    """

    field: str
    kind: str
    spec: dict[str, Any]


class _Fields(Protocol):
    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None


def constraint_field(request: _Fields) -> str | None:
    """The field of a request's constraint; None without one."""
    return next((constraint.field for constraint in _found(request)), None)


def specification(outputs: dict[str, Any]) -> tuple[str, str]:
    """Kind and text of `SamplingParams.structured_outputs`, as `octavo._core.Vocabulary.compile` takes them."""
    ((kind, value),) = outputs.items()
    if kind == "json_object":
        return kind, ""
    return kind, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def output_constraint(request: _Fields) -> Constraint | None:
    """The one constraint of a request; None for free text.

    Raises:
        InvalidRequest: more than one, or one that makes no sense; `field` names it.
    """
    found = _found(request)
    if len(found) > 1:
        fields = " and ".join(constraint.field for constraint in found)
        raise InvalidRequest(f"{found[1].field}: {fields} cannot be used together; remove one", found[1].field)
    for constraint in found:
        _check(constraint)
    return found[0] if found else None


def _found(request: _Fields) -> list[Constraint]:
    return [*_of_format(request), *_of_outputs(request), *_of_fields(request)]


def _of_format(request: _Fields) -> list[Constraint]:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_schema":
        schema = asked.schema if asked.json_schema is None else asked.json_schema.schema
        if schema is None:
            raise InvalidRequest(
                "response_format.json_schema: is missing; type json_schema needs json_schema.schema",
                "response_format.json_schema",
            )
        return [Constraint("response_format", "json_schema", {"json": schema})]
    if asked.type == "structural_tag":
        raise InvalidRequest(
            "response_format.type: 'structural_tag' is not supported; use json_schema, or a grammar in "
            "structured_outputs",
            "response_format.type",
        )
    if asked.type in ("json", "regex"):
        if not isinstance(asked.value, str if asked.type == "regex" else str | dict):
            what = "a string" if asked.type == "regex" else "a JSON schema"
            raise InvalidRequest(
                f"response_format.value: type {asked.type} requires {what}",
                "response_format.value",
            )
        return [Constraint("response_format", asked.type, {asked.type: asked.value})]
    if asked.type == "json_object" and asked.schema is not None:
        return [Constraint("response_format", "json_object", {"json": asked.schema})]
    return [Constraint("response_format", "json_object", {"json_object": True})]


def _of_outputs(request: _Fields) -> list[Constraint]:
    asked = request.structured_outputs
    if asked is None:
        return []
    for option in _UNSUPPORTED:
        if getattr(asked, option) not in (None, False):
            raise InvalidRequest(
                f"structured_outputs.{option}: not supported; remove the field", f"structured_outputs.{option}"
            )
    given = {option: getattr(asked, option) for option in _OPTIONS if getattr(asked, option) not in (None, False)}
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: {len(given)} of {', '.join(_OPTIONS)} are set; set exactly one", "structured_outputs"
        )
    return [Constraint("structured_outputs", next(iter(given)), given)]


def _of_fields(request: _Fields) -> list[Constraint]:
    # An empty text is how llama.cpp's own page says: none.
    given = {field: getattr(request, field) for field in _FIELDS}
    return [
        Constraint(field, kind, {kind: given[field]})
        for field, kind in _FIELDS.items()
        if given[field] is not None and (given[field] != "" or field.startswith("guided_"))
    ]


def _check(constraint: Constraint) -> None:
    field = constraint.field
    for kind, value in constraint.spec.items():
        if kind == "json":
            if isinstance(value, str):
                value = constraint.spec["json"] = _parsed(value, field)
            if not isinstance(value, dict | bool):
                raise InvalidRequest(f"{field}: a schema must be a JSON object, not a {type(value).__name__}", field)
            if _too_deep(value):
                raise InvalidRequest(
                    f"{field}: the schema is nested more than {MAX_NESTING} levels deep; flatten it", field
                )
        elif kind in ("regex", "grammar"):
            if not value or len(value) > MAX_PATTERN or "\0" in value:
                raise InvalidRequest(f"{field}: a {kind} must have 1 to {MAX_PATTERN} characters and no NUL", field)
        elif kind == "choice" and not (value and all(value)):
            raise InvalidRequest(f"{field}: give at least one choice, and no empty one", field)


def _parsed(text: str, field: str) -> Any:
    if len(text) > MAX_SCHEMA:
        raise InvalidRequest(f"{field}: a schema may have {MAX_SCHEMA} bytes, not {len(text)} characters", field)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{field}: the string is not valid JSON; give the schema as an object", field) from None


def _too_deep(schema: Any) -> bool:
    level = [schema]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
