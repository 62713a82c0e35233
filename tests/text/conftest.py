from __future__ import annotations

import random
from pathlib import Path

import pytest
from octavo.loading.resolve import ModelSource, resolve_model
from octavo.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo() -> ModelSource:
    return resolve_model("demo")


@pytest.fixture(scope="session")
def demo_tokenizer(demo: ModelSource) -> Tokenizer:
    return Tokenizer.from_source(demo)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Prose, code, scripts of the world, whitespace of every kind, and mixtures of these."""
    rng = random.Random(0)
    texts = [
        "",
        " ",
        "   ",
        "\n\n\n",
        "\t x\r\ny",
        "Hello, world!",
        " leading and trailing ",
        "It's we've I'LL they'd O'Brien 'sudo",
        "3.14159 1234567890 1,000,000 ½ ② ٣٤٥ १२३",
        "def f(x):\n    return [x ** 2 for x in range(10)]\n\n\n# done\n",
        "naïve façade Ünïcödé e\u0301 \u0041\u030a",
        "日本語のテキスト。中文字符，한국어 텍스트",
        "Привет мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم สวัสดีชาวโลก नमस्ते दुनिया",
        "🎉👨‍👩‍👧‍👦🏳️‍🌈 emoji 🇫🇷",
        "zero\u200bwidth\u00a0space\u3000wide \ufeff bom",
        "\x00\x01\x7f control",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
        "<|im_start|><|im_end|> <file_sep>x<repo_name>",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 20,
        "CamelCase snake_case kebab-case http://example.org/a?b=c&d=%20#e",
        "ﬁ ligature ＡＢＣ full width ℌ Å",
    ]
    sources = [ROOT / "README.md", ROOT / "pyproject.toml", *sorted((ROOT / "rust").rglob("*.rs"))[:6]]
    files = [path.read_text() for path in sources if path.exists()]
    texts += files
    for _ in range(200):
        parts = [rng.choice(texts[:21]) for _ in range(rng.randint(1, 4))]
        file = rng.choice(files)
        start = rng.randrange(len(file))
        parts.insert(rng.randrange(len(parts) + 1), file[start : start + rng.randint(1, 200)])
        texts.append(rng.choice(["", " ", "  ", "\n"]).join(parts))
    for _ in range(200):
        texts.append("".join(chr(rng.choice((rng.randint(1, 0x7F), rng.randint(0xA0, 0x3000)))) for _ in range(40)))
    return texts
