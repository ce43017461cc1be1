"""Messages that go before a link's own ones when callers must prove themselves (`core.live.handshake`).

server → Challenge;  client → Introduction;  server → Accepted | Rejected (then it closes)
"""

from __future__ import annotations

from anabranch.core.messages import Message


class Challenge(Message, frozen=True, kw_only=True):
    nonce: bytes


class Introduction(Message, frozen=True, kw_only=True):
    """A `core.authentication.Claim`."""

    session: bytes
    nonce: bytes
    tenant: str = "default"
    namespace: str = "default"
    epoch: str = ""
    proof: bytes = b""


class Accepted(Message, frozen=True, kw_only=True):
    """`proof`: the server knows the secret too."""

    proof: bytes = b""


class Rejected(Message, frozen=True, kw_only=True):
    reason: str
    code: str = "denied"
