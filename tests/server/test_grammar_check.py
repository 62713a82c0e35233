"""Constraints are compiled once, in threads, before they reach the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from octavo._core import TokenTable, Vocabulary
from octavo.errors import ConfigError, InvalidRequest, Overloaded
from octavo.sampling_params import SamplingParams
from octavo.server.apis.openai.completion_request import CompletionRequest
from octavo.server.error_responses import QueueFull
from octavo.server.models import grammar_check
from octavo.server.models.grammar_check import GrammarCheck
from octavo.server.models.model_handle import ModelHandle
from octavo.server.queueing.compile_queue import CompileQueue
from octavo.server.request.decoding import decode
from octavo.server.request.structured_outputs import constraint_field, specification
from octavo.server.settings import ServerSettings
from octavo.text.fake_tokenizer import fake_tokenizer
from server_fakes import FakeEngine


class Panic(BaseException):
    """As an extension module's: no Exception."""


class SlowVocabulary:
    """Compiles while `go` is not set; specifications that say so are wrong."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, kind: str, spec: str) -> None:
        self.compiled.append(spec)
        assert self.go.wait(20)
        if "wrong" in spec:
            raise InvalidRequest(f"{spec} at 3")
        if "fault" in spec:
            raise RuntimeError("a fault")
        if "busy" in spec:
            raise Overloaded("ask again")
        if "panic" in spec:
            raise Panic


@pytest.fixture
def slow() -> tuple[GrammarCheck, SlowVocabulary]:
    check: Any = GrammarCheck(FakeEngine(), CompileQueue(3))
    check._tokenizer = SimpleNamespace(token_table=None)
    check._vocabulary = SlowVocabulary()
    return check, check._vocabulary


def test_equal_constraints_are_compiled_once(
    slow: tuple[GrammarCheck, SlowVocabulary],
) -> None:
    check, vocabulary = slow

    async def main() -> list[Any]:
        asked = [
            asyncio.ensure_future(check.check("regex", spec, f"field{number}"))
            for number, spec in enumerate(["a", "wrong", "a", "wrong"])
        ]
        longest, before = 0.0, time.monotonic()
        for _ in range(50):
            await asyncio.sleep(0.002)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        assert longest < 0.5
        # Who leaves takes nothing from who asked for the same.
        asked[0].cancel()
        vocabulary.go.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(InvalidRequest, match="again: wrong at 3") as caught:
            await check.check("regex", "wrong", "again")
        assert caught.value.field == "again"
        return found

    found = asyncio.run(main())
    assert [type(result) for result in found] == [asyncio.CancelledError, InvalidRequest, type(None), InvalidRequest]
    assert [str(result) for result in (found[1], found[3])] == ["field1: wrong at 3", "field3: wrong at 3"]
    assert sorted(vocabulary.compiled) == ["a", "wrong"]


def test_kinds_are_distinguished_and_crashes_are_not_cached(slow: tuple[GrammarCheck, SlowVocabulary]) -> None:
    check, vocabulary = slow
    vocabulary.go.set()

    async def main() -> None:
        for kind in ("regex", "grammar", "regex"):
            await check.check(kind, "a", "field")
        for _ in range(2):
            with pytest.raises(RuntimeError):
                await check.check("regex", "fault", "field")
        for _ in range(2):
            with pytest.raises(Overloaded, match="ask again"):
                await check.check("regex", "busy", "field")
        with pytest.raises(RuntimeError, match="the compiler of constraints failed"):
            await check.check("regex", "panic", "field")
        with pytest.raises(InvalidRequest) as caught:
            await check.check("regex", "wrong" * 1000, "field")
        assert len(str(caught.value)) < 700

    asyncio.run(main())
    assert vocabulary.compiled == ["a", "a", "fault", "fault", "busy", "busy", "panic", "wrong" * 1000]


def test_too_many_at_once(slow: tuple[GrammarCheck, SlowVocabulary], monkeypatch: pytest.MonkeyPatch) -> None:
    check, vocabulary = slow
    monkeypatch.setattr(grammar_check, "_MAX_KNOWN", 2)

    async def main() -> None:
        # Two are compiled, three wait.
        asked = [asyncio.ensure_future(check.check("regex", str(number), "field")) for number in range(5)]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await check.check("regex", "5", "field")
        same = asyncio.ensure_future(check.check("regex", "1", "field"))
        # Those that wait no more leave their places, and what they brought, at once.
        for _ in range(20):
            asked.pop().cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asked.append(asyncio.ensure_future(check.check("regex", "4", "field")))
            await asyncio.sleep(0)
        assert check._queue._num_waiting == sum(map(len, check._queue._waiting.values())) == 3
        vocabulary.go.set()
        await asyncio.gather(*asked, same)
        # Two are remembered.
        for spec in ("5", "6", "5", "6", "0"):
            await check.check("regex", spec, "field")

    asyncio.run(main())
    assert sorted(vocabulary.compiled) == ["0", "0", "1", "2", "3", "4", "5", "6"]


def test_tenants_take_turns_and_cancelled_compilations_are_skipped(
    slow: tuple[GrammarCheck, SlowVocabulary],
) -> None:
    check, vocabulary = slow
    check._queue = CompileQueue(100)

    async def main() -> None:
        flood = [asyncio.ensure_future(check.check("regex", f"f{number}", "field", "flood")) for number in range(20)]
        await asyncio.sleep(0.01)
        other = asyncio.ensure_future(check.check("regex", "other", "field", "quiet"))
        await asyncio.sleep(0.01)
        gone, *flood[10:] = flood[10:]
        gone.cancel()
        await asyncio.sleep(0)
        # Who comes for it after all is answered.
        again = asyncio.ensure_future(check.check("regex", "f10", "field", "quiet"))
        for late in flood[15:]:
            late.cancel()
        vocabulary.go.set()
        await other
        await again
        await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(main())
    assert set(vocabulary.compiled[:2]) == {"f0", "f1"}
    assert "other" in vocabulary.compiled[2:5]
    assert vocabulary.compiled.count("f10") == 1
    assert not {"f16", "f17", "f18", "f19"} & set(vocabulary.compiled)


def test_a_real_vocabulary() -> None:
    engine: Any = FakeEngine()
    engine.tokenizer = tokenizer = fake_tokenizer()
    check: Any = GrammarCheck(engine, CompileQueue(10))
    check._model = SimpleNamespace(vocab_size=len(tokenizer.vocabulary.tokens), eos_token_ids=tokenizer.eos_token_ids)

    async def main() -> None:
        await check.check("json", '{"type": "object"}', "field")
        with pytest.raises(InvalidRequest, match=r"field: .*frob"):
            await check.check("json", '{"type": "frob"}', "field")
        # A model without an end cannot end an answer either.
        endless: Any = GrammarCheck(engine, CompileQueue(10))
        endless._model = SimpleNamespace(vocab_size=check._model.vocab_size, eos_token_ids=())
        with pytest.raises(InvalidRequest, match="field: this model does not support the constraint"):
            await endless.check("json_object", "", "field")

    asyncio.run(main())


def test_the_limit_is_the_compilers() -> None:
    vocabulary = Vocabulary(TokenTable([b"a", b"</s>"], b"\0\1"), [1], 2)
    assert ServerSettings().max_constraint_bytes == 1 << 18
    vocabulary.compile("choice", '["a"' + " " * ((1 << 18) - 5) + "]")
    with pytest.raises(InvalidRequest, match="262145 bytes"):
        vocabulary.compile("choice", '["a"' + " " * ((1 << 18) - 4) + "]")
    with pytest.raises(ConfigError, match="max_constraint_bytes: 262145"):
        ServerSettings(max_constraint_bytes=(1 << 18) + 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "json", "schema"]), inner),
    max_leaves=6,
)
FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema", "grammar", "regex", "ebnf", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens",
)  # fmt: skip


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2))
@example(fields={"response_format": {"type": "json_schema", "schema": {"type": "\ud800"}}})
@example(fields={"structured_outputs": {"json": "[]"}})
@example(fields={"structured_outputs": {"json": True}})
@example(fields={"structured_outputs": {"choice": []}})
def test_random_constraints_are_compiled_or_refused(fields: dict[str, Any]) -> None:
    served = ModelHandle(FakeEngine(constrains_output=True))
    try:
        request = decode(CompletionRequest, msgspec.json.encode({"prompt": "x", **fields}))
        params = request.sampling_params(served, max_tokens=5, logprobs=None)
    except (InvalidRequest, UnicodeEncodeError):
        return
    # As it goes to the engine's process.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert (params.structured_outputs is None) == (constraint_field(request) is None)
    if params.structured_outputs is not None:
        kind, text = specification(params.structured_outputs)
        assert kind in ("json", "regex", "choice", "grammar", "json_object")
        assert isinstance(text, str)
