"""A burst of connections is served first come, first served."""

from __future__ import annotations

import asyncio

import uvloop
from test_push import ask, served

_CONNECTIONS = 512
_MAX_DISPLACEMENT = 128


def test_first_tokens_come_in_the_order_of_arrival() -> None:
    """Twice as many connections at once as the engine runs: none is overtaken by many others."""

    async def main() -> list[int]:
        order: list[int] = []
        async with served("fake?step_ms=2") as (port, _, _):

            async def request(number: int) -> None:
                prompt = [(number + place) % 200 + 20 for place in range(16)]
                body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "stream": True}
                reader, writer = await ask(port, "/v1/completions", body)
                await reader.readuntil(b"data: ")
                order.append(number)
                assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                writer.close()

            await asyncio.gather(*(request(number) for number in range(_CONNECTIONS)))
        return order

    order = uvloop.run(asyncio.wait_for(main(), 60))
    displaced = [abs(place - number) for place, number in enumerate(order)]
    assert max(displaced) <= _MAX_DISPLACEMENT
