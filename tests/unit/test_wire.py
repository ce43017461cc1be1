from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import WireError
from anabranch.core.messages import Message
from anabranch.core.wire import HEADER, MAX_FRAME_BYTES, FrameDecoder, encode


class Hello(Message, frozen=True, kw_only=True):
    name: str
    numbers: list[int] = []


class Bye(Message, frozen=True, kw_only=True):
    reason: bytes = b""


messages = st.one_of(
    st.builds(Hello, name=st.text(), numbers=st.lists(st.integers(-(2**63), 2**63 - 1))),
    st.builds(Bye, reason=st.binary(max_size=300)),
)


@given(st.lists(messages), st.integers(1, 50))
def test_any_cut_of_the_stream_gives_the_same_messages(sent: list[Message], step: int) -> None:
    stream = b"".join(map(encode, sent))
    decoder: FrameDecoder[Message] = FrameDecoder(Hello | Bye)
    got = [m for at in range(0, len(stream), step) for m in decoder.feed(stream[at : at + step])]
    assert got == sent


def test_an_oversized_frame_is_refused_before_it_is_buffered() -> None:
    with pytest.raises(WireError, match="exceeds"):
        FrameDecoder[Message](Hello | Bye).feed(HEADER.pack(MAX_FRAME_BYTES + 1))
    with pytest.raises(WireError, match="Bye"):
        encode(Bye(reason=bytes(MAX_FRAME_BYTES + 1)))


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_an_error_or_nothing_but_never_a_crash(body: bytes) -> None:
    decoder: FrameDecoder[Message] = FrameDecoder(Hello | Bye)
    try:
        for message in decoder.feed(HEADER.pack(len(body)) + body):
            assert isinstance(message, Hello | Bye)
    except WireError:
        pass


def test_unknown_fields_are_ignored_and_unknown_tags_are_not() -> None:
    class HelloV2(Message, frozen=True, kw_only=True, tag="Hello"):
        name: str
        extra: int = 7

    assert FrameDecoder[Message](Hello | Bye).feed(encode(HelloV2(name="x"))) == [Hello(name="x")]

    class Other(Message, frozen=True, kw_only=True):
        pass

    with pytest.raises(WireError, match="malformed"):
        FrameDecoder[Message](Hello | Bye).feed(encode(Other()))
