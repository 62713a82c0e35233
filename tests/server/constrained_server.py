"""A server whose model is tiny and random: whatever it says that makes sense, it was held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pydantic
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from server_harness import Running
from tiny_checkpoint import write_tiny_llama

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
USER: list[Any] = [{"role": "user", "content": "Order"}]


class Item(pydantic.BaseModel, extra="forbid"):
    """Of an order. Texts are bounded: a random model ends none by itself."""

    name: str = pydantic.Field(max_length=6)
    count: int = pydantic.Field(ge=0, le=99)


class Order(pydantic.BaseModel, extra="forbid"):
    """What answers are held to."""

    number: int = pydantic.Field(ge=1, le=9999)
    kind: Literal["new", "old"]
    paid: bool
    items: list[Item] = pydantic.Field(min_length=1, max_length=2)
    note: str | None = pydantic.Field(max_length=8)


def start_constrained(folder: Path, **settings: Any) -> Running:
    """Start one, of a checkpoint that is written to `folder`."""
    write_tiny_llama(folder, 5)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}), encoding="utf-8")

    async def starting() -> AsyncEngine:
        return await AsyncEngine.start(
            EngineConfig(
                model=str(folder), dtype="float32", device="cpu", num_threads=1, num_blocks=2048, max_num_seqs=16
            )
        )

    return Running(None, ServerState(ServerSettings(**settings)), starting=starting)
