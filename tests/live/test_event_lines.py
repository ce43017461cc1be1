"""Lines of an event stream as a client of an endpoint reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

from anabranch.serving.live.endpoint import lines


def test_characters_of_an_answer_end_no_line() -> None:
    text = "a\u2028b\x85c\x1cd\x0be"
    body = f"data: {text}\r\n\r\ndata: [DONE]\n\n: end".encode()

    async def pieces() -> AsyncIterator[bytes]:
        for byte in body:
            yield bytes([byte])

    async def read() -> list[str]:
        return [line async for line in lines(httpx.Response(200, content=pieces()))]

    assert asyncio.run(read()) == [f"data: {text}", "", "data: [DONE]", "", ": end"]
