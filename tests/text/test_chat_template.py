from __future__ import annotations

import datetime
import time
import tracemalloc
from typing import Any

import pytest
from octavo.errors import InvalidRequest, UnsupportedModel
from octavo.text import chat_template
from octavo.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{%- if strftime_now is defined %}
    {%- set date = strftime_now("%Y") %}
{%- endif %}
{{- bos_token }}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " ~ date ~ "\n" ~ system ~ "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}{% endfor %}"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.reasoning_content is string and loop.index0 > ns.last %}
        {{- '<|im_start|>assistant\\n<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {{- message.content.lstrip('\\n') }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
CONTROLS = """{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% generation %}{{ message.content|upper }}{% endgeneration %}
  {{ dict(a=1)|tojson(indent=2) }} {{ {'b': '<é&>', 'a': [1, 2.5, none, true]}|tojson(sort_keys=true) }}
  {{ message.items()|list|length }} {{ message.get('name', 'nobody') }} {{ pad_token }}{{ sep_token }}
{% endfor %}
{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "gemma": GEMMA,
    "controls": CONTROLS,
}

USER = {"role": "user", "content": " Hi <there> & \"you\" 'é' 日本\n"}
ASSISTANT = {"role": "assistant", "content": "Hello.\n"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"q": "<b> é", "n": [1, 2]}}}],
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "  Be brief. "}, USER],
    [USER, ASSISTANT, USER],
    [USER, ASSISTANT, USER, ASSISTANT, USER],
    [USER, {"role": "assistant", "content": "", "reasoning_content": "\nhm\n"}],
    [USER, {"role": "assistant", "content": "a", "reasoning": "because"}],
    [USER, CALL, {"role": "tool", "content": "7", "name": "f"}],
    [{"role": "assistant", "content": "first"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<x> é", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def oracle():
    """transformers' rendering, with the same special tokens; None where it fails."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)

    def render(template: str, messages: list[dict[str, Any]], **arguments: Any) -> str | None:
        try:
            return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
        except Exception:
            return None

    return render


@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name, oracle):
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    rendered = refused = 0
    for messages in CONVERSATIONS:
        for arguments in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False, "tools": TOOLS},
            {"add_generation_prompt": True, "enable_thinking": False},
        ):
            expected = oracle(TEMPLATES[name], messages, **arguments)
            if expected is None:
                refused += 1
                with pytest.raises(InvalidRequest):
                    template.render(messages, **arguments)
            else:
                rendered += 1
                assert template.render(messages, **arguments) == expected, messages
    assert rendered >= 9
    if name in ("mistral", "gemma"):
        assert refused >= 3


@pytest.mark.demo
def test_demo_equals_transformers(demo, demo_tokenizer):
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(demo.path.parent, gguf_file=demo.path.name)
    for messages in CONVERSATIONS[:4]:
        for prompt in (True, False):
            text = demo_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
            assert text == oracle.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            ids = demo_tokenizer.encode_chat(messages, add_generation_prompt=prompt)
            expected = oracle.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert ids == expected
    assert "You are a helpful AI assistant named SmolLM" in demo_tokenizer.apply_chat_template([USER])


def test_text_parts_are_joined():
    template = ChatTemplate("{{ messages[0].content }}", {})
    parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo\nthree"
    assert template.render([{"role": "user", "content": []}]) == ""


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (["hi"], r"messages\[0\]: an object"),
        ([{"content": "x"}], r"messages\[0\]\.role: None"),
        ([USER, {"role": 3, "content": "x"}], r"messages\[1\]\.role: 3"),
        ([{"role": "user", "content": 5}], "int is neither text nor a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "parts of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "parts of type 'text'"),
        ([{"role": "user", "content": [7]}], "parts of type None"),
        ([{"role": "user", "content": "x", "extra": object()}], "a object is no JSON value"),
    ],
)
def test_messages_of_another_form(messages, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate(CHATML, {}).render(messages)
    assert caught.value.field == "messages"


def test_what_the_template_refuses():
    with pytest.raises(InvalidRequest, match="refuses them: System role not supported") as caught:
        ChatTemplate(GEMMA, SPECIAL).render([{"role": "system", "content": "x"}])
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequest, match=r"failed on them: .*no attribute 'nothing'"):
        ChatTemplate("{{ messages[0].nothing.more }}", {}).render([USER])
    with pytest.raises(InvalidRequest, match="failed on them"):
        ChatTemplate("{{ 1 // 0 }}", {}).render([USER])


def test_a_conversation_stays_as_it_was():
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    ChatTemplate("{{ messages }}", {}).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]


def test_the_date():
    today = datetime.datetime.now().strftime("%d %b %Y")
    assert today in ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render([USER])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% include 'a' %}{% endif %}", "{% unknown %}"])
def test_templates_that_are_none(source):
    with pytest.raises(UnsupportedModel, match="not valid jinja"):
        ChatTemplate(source, {})


def test_a_template_of_absurd_length():
    with pytest.raises(UnsupportedModel, match="too many"):
        ChatTemplate("x" * 2_000_000, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__['os'].system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__}'.format(1) }}{{ ''|attr('__class__') }}{{ (1).__class__.mro() }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ range(10 ** 9) }}",
        "{{ range(1000000)|list }}",
        "{{ lipsum(n=100000) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [0] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_that_would_do_harm(source):
    with pytest.raises(InvalidRequest, match="the chat template failed on them"):
        ChatTemplate(source, {}).render([USER])


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "_OUTPUT_LIMIT", 10_000)
    with pytest.raises(InvalidRequest, match="writes too much"):
        ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}", {}).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999)|list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}"
        "{% for a in range(99999) %}{{ m() }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% macro m(n) %}{% if n %}{% call k(n) %}{% endcall %}{% call k(n) %}{% endcall %}{% endif %}{% endmacro %}"
        "{% macro k(n) %}{{ caller() }}{{ m(n - 1) }}{% endmacro %}{{ m(40) }}",
    ],
)
def test_time_is_bounded(monkeypatch, source):
    monkeypatch.setattr(chat_template, "_SECONDS_LIMIT", 0.2)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="runs too long"):
        ChatTemplate(source, {}).render([USER])
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "grow",
    [
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.i = ns.i * ns.i %}",
    ],
)
def test_what_doubles_is_stopped_early(grow):
    begun = time.monotonic()
    source = "{% set ns = namespace(x='a', l=[1], i=9) %}{% for i in range(99) %}" + grow + "{% endfor %}"
    with pytest.raises(InvalidRequest, match="too much"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x'.center(999999999) }}",
        "{{ 'x'.ljust(width) }}",
        "{{ '5'.zfill(999999999) }}",
        "{{ 'x'|center(999999999) }}",
        "{{ 'x\ny'|indent(999999999) }}",
        "{{ 'x'|indent(width=999999999) }}",
        "{{ '\t'.expandtabs(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '%.999999999f'|format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w='999999999') }}",
        "{{ '{x:{w}}'.format_map({'x': 1, 'w': '999999999'}) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000)|replace('', 'y' * 100000) }}",
        "{{ ('y' * 100000).join('x' * 100000) }}",
        "{{ ('x' * 100000)|join('y' * 100000) }}",
        "{{ [1]|batch(999999999, 'x') }}",
    ],
)
def test_what_pads_or_repeats_is_stopped_before_it_does(source):
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="too much"):
            ChatTemplate(source, {}).render([USER], width=999999999)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_padding_of_ordinary_size():
    source = (
        "{{ 'x'.center(5) }}|{{ 'a-b'.replace('-', '+') }}|{{ ', '.join(['a', 'b']) }}|{{ ['a', 'b']|join('; ') }}|"
        "{{ '%s: %5.2f %%' % ('a', 1) }}|{{ '%s**%s**'|format('a', 'b') }}|{{ '{:>4}'.format(7) }}|"
        "{{ '{0}-{k}'.format(1, k=2) }}|{{ 'a\nb'|indent(2) }}|{{ 7 % 3 }}|{{ [1, 2, 3]|batch(2)|list }}|"
        "{{ {'a': 1}|tojson(indent=1) }}|{{ ['a', 'b']|map('replace', 'a', 'c')|join }}"
    )
    written = ChatTemplate(source, {}).render([USER]).split("|")
    assert written == [
        "  x  ", "a+b", "a, b", "a; b", "a:  1.00 %", "a**b**", "   7", "1-2", "a\n  b", "1", "[[1, 2], [3]]",
        '{\n "a": 1\n}', "cb",
    ]  # fmt: skip


def test_sums_and_joins_of_ordinary_size():
    source = "{{ 1 + 2 * 3 }}{{ 'a' + 'b' ~ 3 ~ nothing ~ none }}{{ ([1] + [2]) | length }}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}]) == "7ab3None2"


def _begun(template: str, content: str) -> str:
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": content}]
    return ChatTemplate(template, SPECIAL).render(messages, continue_final_message=True)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
@pytest.mark.parametrize(
    "content", ["end", "i", "<", "|", "m", "eot", "Sure:\n```json\n", "The answer is: ", " yes", "Go."]
)
def test_a_begun_answer_is_cut_as_transformers_cuts_it(template, content):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": content}]
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=template, continue_final_message=True, **SPECIAL
    )
    assert _begun(template, content) == rendered[0]


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
@pytest.mark.parametrize("content", ["", None])
def test_a_begun_answer_may_be_empty(template, content):
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    opened = ChatTemplate(template, SPECIAL).render(messages, add_generation_prompt=True)
    assert _begun(template, content) == opened


def test_a_begun_answer_that_the_template_does_not_write():
    with pytest.raises(InvalidRequest, match="does not write the last message") as caught:
        _begun("{{ messages[0].content }}", "Sure")
    assert caught.value.field == "continue_final_message"
    with pytest.raises(InvalidRequest, match="no message to continue"):
        ChatTemplate(CHATML, SPECIAL).render([], continue_final_message=True)
