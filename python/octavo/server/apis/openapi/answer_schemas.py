"""JSON schemas of the answers, by name; what clients may rely on, written by hand."""

from __future__ import annotations

from typing import Any

__all__ = ["ANSWERS", "reference"]

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_ANY: Schema = {}


def reference(name: str) -> Schema:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


_FINISH = _or_null(_one_of("stop", "length"))
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_IDS = _or_null(_list({"type": "integer"}))

ANSWERS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _or_null(_TEXT),
                    "code": {"type": ["string", "integer", "null"]},
                }
            )
        }
    ),
    "AnthropicError": _object(
        {"type": _one_of("error"), "error": _object({"type": _TEXT, "message": _TEXT})}, {"request_id": _TEXT}
    ),
    "Usage": _object(
        {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
        {"prompt_tokens_details": _object({"cached_tokens": _COUNT})},
    ),
    "TokenLogprob": _object(
        {"token": _TEXT, "logprob": _NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})},
        {"top_logprobs": _list(reference("TokenLogprob"))},
    ),
    "ChatLogprobs": _object({"content": _list(reference("TokenLogprob"))}),
    "CompletionLogprobs": _object(
        {
            "text_offset": _list(_COUNT),
            "token_logprobs": _list(_or_null(_NUMBER)),
            "tokens": _list(_TEXT),
            "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        }
    ),
    "ChatCompletion": _object(
        {
            "id": _TEXT,
            "object": _one_of("chat.completion"),
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _object({"role": _one_of("assistant"), "content": _or_null(_TEXT)}),
                        "logprobs": _or_null(reference("ChatLogprobs")),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP_REASON,
                    },
                    {"token_ids": _IDS},
                )
            ),
            "usage": reference("Usage"),
        },
        {"system_fingerprint": _or_null(_TEXT), "service_tier": _or_null(_TEXT), "prompt_token_ids": _IDS},
    ),
    "ChatCompletionChunk": _object(
        {
            "id": _TEXT,
            "object": _one_of("chat.completion.chunk"),
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "delta": _object({}, {"role": _TEXT, "content": _TEXT}),
                        "logprobs": _or_null(reference("ChatLogprobs")),
                        "finish_reason": _FINISH,
                    },
                    {"stop_reason": _STOP_REASON, "token_ids": _IDS},
                )
            ),
        },
        {"system_fingerprint": _or_null(_TEXT), "usage": reference("Usage"), "prompt_token_ids": _IDS},
    ),
    "Completion": _object(
        {
            "id": _TEXT,
            "object": _one_of("text_completion"),
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": _TEXT,
                        "logprobs": _or_null(reference("CompletionLogprobs")),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP_REASON,
                    },
                    {"token_ids": _IDS, "prompt_token_ids": _IDS},
                )
            ),
        },
        {"usage": reference("Usage"), "system_fingerprint": _or_null(_TEXT)},
    ),
    "Model": _object(
        {
            "id": _TEXT,
            "object": _one_of("model"),
            "created": _COUNT,
            "owned_by": _TEXT,
            "root": _TEXT,
            "parent": _or_null(_TEXT),
            "max_model_len": _or_null(_COUNT),
        },
        {"permission": _list(_ANY)},
    ),
    "ModelList": _object({"object": _one_of("list"), "data": _list(reference("Model"))}),
    "Version": _object({"version": _TEXT}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": _or_null(_list(_TEXT)),
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "TokenizerInfo": _object(
        {"tokenizer_class": _TEXT, "vocab_size": _COUNT, "model_max_length": _COUNT},
        {"bos_token": _or_null(_TEXT), "eos_token": _or_null(_TEXT), "chat_template": _or_null(_TEXT)},
    ),
    "Response": _object(
        {
            "id": _TEXT,
            "object": _one_of("response"),
            "created_at": _COUNT,
            "status": _one_of("completed", "incomplete", "in_progress"),
            "model": _TEXT,
            "output": _list(
                _object(
                    {
                        "type": _one_of("message"),
                        "id": _TEXT,
                        "status": _TEXT,
                        "role": _one_of("assistant"),
                        "content": _list(
                            _object({"type": _one_of("output_text"), "text": _TEXT, "annotations": _list(_ANY)})
                        ),
                    }
                )
            ),
            "usage": _or_null(
                _object(
                    {
                        "input_tokens": _COUNT,
                        "input_tokens_details": _object({"cached_tokens": _COUNT}),
                        "output_tokens": _COUNT,
                        "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
                        "total_tokens": _COUNT,
                    }
                )
            ),
        }
    ),
    "Message": _object(
        {
            "id": _TEXT,
            "type": _one_of("message"),
            "role": _one_of("assistant"),
            "model": _TEXT,
            "content": _list(_object({"type": _one_of("text"), "text": _TEXT})),
            "stop_reason": _one_of("end_turn", "max_tokens", "stop_sequence"),
            "stop_sequence": _or_null(_TEXT),
            "usage": _object(
                {"input_tokens": _COUNT, "output_tokens": _COUNT},
                {"cache_read_input_tokens": _COUNT, "cache_creation_input_tokens": _COUNT},
            ),
        }
    ),
    "InputTokens": _object({"input_tokens": _COUNT}),
}
