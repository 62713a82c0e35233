"""Answers of one form, as the clients of every API ask for them. The model is random: only the constraint can do it."""

from __future__ import annotations

import asyncio
import json
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import ollama
import openai
import pydantic
import pytest
from constrained_server import USER, Item, Order, start_constrained
from huggingface_hub import InferenceClient, TextGenerationInputGrammarType
from octavo.server.models.grammar_check import GrammarCheck
from server_harness import Running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start_constrained(tmp_path_factory.mktemp("models") / "tiny")
    yield running
    running.stop()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SCHEMA = Order.model_json_schema()
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_parse(client: openai.OpenAI, temperature: float) -> None:
    found = set()
    for seed in range(4):
        done = client.chat.completions.parse(
            model="fake", messages=USER, response_format=Order, temperature=temperature, seed=seed, n=2
        )
        for choice in done.choices:
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Order)
            found.add(choice.message.content)
    # What is drawn is the model's own.
    assert len(found) == 1 if temperature == 0 else len(found) == 8


def test_parse_by_asyncio(server: Running) -> None:
    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

            async def streamed(seed: int) -> Any:
                how: Any = {"model": "fake", "messages": USER, "response_format": Order, "seed": seed}
                async with client.chat.completions.stream(**how) as stream:
                    return await stream.get_final_completion()

            def whole(seed: int) -> Any:
                return client.chat.completions.parse(model="fake", messages=USER, response_format=Order, seed=seed)

            return await asyncio.gather(*map(whole, range(6)), *map(streamed, range(6)))

    answers = [done.choices[0].message for done in asyncio.run(main())]
    assert all(isinstance(message.parsed, Order) for message in answers)
    # Streamed or not, beside whatever else runs: the same.
    assert [message.content for message in answers[:6]] == [message.content for message in answers[6:]]


def test_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=USER, response_format=Order, n=2) as stream:
        texts = ["", ""]
        for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        done = stream.get_final_completion()
    for text, choice in zip(texts, done.choices, strict=True):
        assert choice.message.parsed == Order.model_validate_json(text)
        assert choice.finish_reason == "stop"


def test_logprobs_of_held_tokens(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="fake", messages=USER, response_format=Item, logprobs=True, top_logprobs=5, temperature=0
    )
    entries = done.choices[0].logprobs.content  # type: ignore[union-attr]
    text = b"".join(bytes(entry.bytes or ()) for entry in entries or ()).decode()
    assert text == f"{done.choices[0].message.content}</s>"
    assert all(entry.logprob > -9999 for entry in entries or ())


def test_a_client_that_leaves_takes_its_constraint_along(server: Running) -> None:
    body = {"prompt": "Order", "max_tokens": 3000, "stream": True, "guided_regex": "[a-z]{3000}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        assert next(answer.iter_lines()).startswith("data: {")
    end = time.monotonic() + 10
    while "octavo_open_requests" not in (text := httpx.get(f"{server.url}/metrics").text) or not re.search(
        r"^octavo_open_requests\{.*\} 0(\.0)?$", text, re.MULTILINE
    ):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_cut_short(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="fake", messages=USER, response_format=FORMAT, max_tokens=7)
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", 7)  # type: ignore[union-attr]
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="fake", messages=USER, response_format=Order, max_tokens=7)


def test_ignore_eos_ends_where_the_form_does(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "guided_choice": ["yes", "no"]}
    done = client.chat.completions.create(model="fake", messages=USER, extra_body=extra, max_tokens=20).choices[0]
    assert done.message.content in ("yes", "no")


GBNF = 'root ::= "x" digit digit\ndigit ::= [0-9]'
LARK = 'start: "x" DIGIT DIGIT\nDIGIT: /[0-9]/'


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": FORMAT}, None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, None),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, None),
        ({"response_format": {"type": "json", "value": SCHEMA}}, None),
        ({"response_format": {"type": "regex", "value": "x[0-9]{2}"}}, "x[0-9]{2}"),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, None),
        ({"guided_json": SCHEMA}, None),
        ({"json_schema": SCHEMA}, None),
        ({"structured_outputs": {"regex": "x[0-9]{2}"}}, "x[0-9]{2}"),
        ({"guided_regex": "(ab|cd)é?"}, "(ab|cd)é?"),
        ({"regex": "x[0-9]{2}"}, "x[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no", "世界"]}}, "yes|no|世界"),
        ({"guided_choice": ["a.b", "a"]}, r"a\.b|a"),
        ({"structured_outputs": {"grammar": LARK}}, "x[0-9]{2}"),
        ({"guided_grammar": GBNF}, "x[0-9]{2}"),
        ({"grammar": GBNF}, "x[0-9]{2}"),
        ({"ebnf": GBNF}, "x[0-9]{2}"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_every_way_to_say_it(server: Running, path: str, fields: dict[str, Any], pattern: str | None) -> None:
    body = {"messages": USER} if path.startswith("chat") else {"prompt": "Order", "max_tokens": 600}
    for stream in (False, True):
        given = body | fields | {"n": 2, "seed": 3, "stream": stream}
        answer = httpx.post(f"{server.url}/v1/{path}", json=given, timeout=60)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.text]
        texts, reasons = ["", ""], {}
        for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            texts[choice["index"]] += said["content"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert reasons == {0: "stop", 1: "stop"}
        for text in texts:
            assert Order.model_validate_json(text) if pattern is None else re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "option", [{}, {"disable_additional_properties": True}, {"disable_additional_properties": False}]
)
def test_an_object_has_the_properties_that_its_schema_names(server: Running, option: dict[str, bool]) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": ["s", "m"]}, "rush": {"type": "boolean"}}}
    body = {
        "prompt": "Order",
        "n": 16,
        "temperature": 2,
        "max_tokens": 60,
        "structured_outputs": {"json": schema} | option,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        pairs = json.loads(choice["text"], object_pairs_hook=list)
        assert [name for name, _ in pairs] in ([], ["size"], ["rush"], ["size", "rush"])


def test_several_prompts(client: openai.OpenAI) -> None:
    extra = {"guided_regex": "[ab]{3}", "best_of": 3, "echo": True}
    done = client.completions.create(model="fake", prompt=["One", "Two"], n=2, extra_body=extra)
    texts = [choice.text for choice in done.choices]
    assert all(
        re.fullmatch(f"{prompt}[ab]{{3}}", text) for prompt, text in zip(["One"] * 2 + ["Two"] * 2, texts, strict=True)
    )


def test_any_object(client: openai.OpenAI, server: Running) -> None:
    (brace,) = httpx.post(f"{server.url}/tokenize", json={"prompt": "}", "add_special_tokens": False}).json()["tokens"]
    done = client.chat.completions.create(
        model="fake", messages=USER, response_format={"type": "json_object"}, logit_bias={str(brace): 100}
    )
    assert json.loads(done.choices[0].message.content or "") == {}
    for seed in range(4):
        choice = client.chat.completions.create(
            model="fake", messages=USER, response_format={"type": "json_object"}, max_tokens=300, seed=seed
        ).choices[0]
        assert (choice.message.content or "").lstrip().startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)


def test_responses(client: openai.OpenAI) -> None:
    reply = client.responses.parse(model="fake", input="Order", text_format=Order)
    assert isinstance(reply.output_parsed, Order)
    with client.responses.stream(model="fake", input="Order", text_format=Order) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Order)


def test_langchain(server: Running, quiet: None) -> None:
    module = pytest.importorskip("langchain_openai")
    models = [
        module.ChatOpenAI(
            base_url=f"{server.url}/v1", api_key="none", model="fake", max_retries=0, use_responses_api=responses
        ).with_structured_output(Order, method="json_schema")
        for responses in (False, True)
    ]
    for model in models:
        assert isinstance(model.invoke("Order"), Order)
        assert isinstance(list(model.stream("Order"))[-1], Order)

    async def main() -> list[Any]:
        return await asyncio.gather(*(model.ainvoke("Order") for model in models))

    assert all(isinstance(answer, Order) for answer in asyncio.run(main()))


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama_chat", "ollama"])
def test_litellm(server: Running, quiet: None, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    base = server.url if provider.startswith("ollama") else f"{server.url}/v1"
    how: dict[str, Any] = {"api_base": base, "api_key": "none", "max_retries": 0}
    for form in (Order, FORMAT):
        done = litellm.completion(f"{provider}/fake", USER, response_format=form, **how)
        Order.model_validate_json(done.choices[0].message.content)


def test_ollama(server: Running) -> None:
    with ollama.Client(server.url, timeout=60) as client:
        for options in ({"temperature": 0}, {"temperature": 1, "seed": 1}):
            done = client.chat("fake", USER, format=SCHEMA, options=options)
            Order.model_validate_json(done.message.content or "")
            assert done.done_reason == "stop"
            Order.model_validate_json(client.generate("fake", "Order", format=SCHEMA, options=options).response)
        parts = client.chat("fake", USER, format=Item.model_json_schema(), stream=True)
        Item.model_validate_json("".join(part.message.content or "" for part in parts))
        text = client.chat("fake", USER, format="json", options={"num_predict": 20}).message.content or ""
        assert text.lstrip().startswith("{")


def test_tgi(server: Running) -> None:
    with InferenceClient(server.url, timeout=60) as client:
        schema = Item.model_json_schema()
        for kind, value in (
            ("json", schema),
            ("json", json.dumps(schema)),
            ("json_schema", {"name": "item", "schema": schema}),
            ("regex", "x[0-9]{2}"),
        ):
            grammar: Any = TextGenerationInputGrammarType(type=kind, value=value)  # type: ignore[arg-type]
            whole = client.text_generation("Order", grammar=grammar, do_sample=True, max_new_tokens=200)
            parts = client.text_generation("Order", grammar=grammar, max_new_tokens=200, stream=True)
            for text in (whole, "".join(parts)):
                assert re.fullmatch(value, text) if kind == "regex" else Item.model_validate_json(text)  # type: ignore[call-overload]
        form: Any = {"type": "json", "value": schema}
        done = client.chat_completion(USER, model="fake", response_format=form)
        Item.model_validate_json(done.choices[0].message.content or "")


class Kind(pydantic.BaseModel):
    kind: Literal["new", "old"]
    paid: bool


def test_anthropic(server: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        # The package leaves bounds out of the schema that it sends.
        done = client.messages.parse(model="fake", max_tokens=600, messages=USER, output_format=Kind)
        assert isinstance(done.parsed_output, Kind)
        assert done.stop_reason == "end_turn"
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        with client.messages.stream(model="fake", max_tokens=600, messages=USER, output_config=config) as stream:
            assert Order.model_validate_json("".join(stream.text_stream))
        config["format"]["schema"] = {"type": "frob"}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: .*frob"):
            client.messages.create(model="fake", max_tokens=600, messages=USER, output_config=config)


@pytest.mark.parametrize("how", ["body", "header"])
def test_a_deadline_while_it_is_compiled(server: Running, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: GrammarCheck, kind: str, text: str) -> None:
        time.sleep(1.5)

    monkeypatch.setattr(GrammarCheck, "_compile", slow)
    body = {"model": "fake", "prompt": "Hi", "max_tokens": 2, "structured_outputs": {"regex": f"{how}{{3}}"}}
    headers = {"X-Request-Timeout": "0.3"} if how == "header" else {}
    began = time.monotonic()
    late = httpx.post(
        f"{server.url}/v1/completions", json=body | ({"timeout": 0.3} if how == "body" else {}), headers=headers
    )
    assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
    assert int(late.headers["retry-after"]) >= 1
    assert 0.25 < time.monotonic() - began < 1.2
    in_time = httpx.post(f"{server.url}/v1/completions", json=body | {"timeout": 9}, timeout=10)
    assert in_time.status_code == 200


def test_a_schema_as_a_text_is_not_read_when_it_is_too_long(server: Running) -> None:
    body = {"model": "fake", "prompt": "Hi", "guided_json": json.dumps({"enum": [[1]] * 60_000})}
    refused = httpx.post(f"{server.url}/v1/completions", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "guided_json"
    assert "may have 262144 bytes" in error["message"]
