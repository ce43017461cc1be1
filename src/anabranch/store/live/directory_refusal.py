"""Why what answers at a directory's address will not serve us: it wants another proof, or is no directory."""

from __future__ import annotations

from anabranch.core.errors import Unavailable
from anabranch.core.handshake import Challenge, Rejected
from anabranch.store.messages import DirectoryToNode
from anabranch.store.values.messages import Greeting

FromDirectory = DirectoryToNode | Challenge | Rejected | Greeting
"""What may come from such an address to somebody who has no secret to prove."""


class Refused(Unavailable):
    """It answers, and does not serve us. Retryable: a secret may be put right while we run. `denied`: it is a matter of
    who we are."""

    def __init__(self, message: str, *, denied: bool) -> None:
        super().__init__(message)
        self.denied = denied


def refusal(address: str, message: object) -> Refused | None:
    """None for what a directory says to those whom it serves."""
    if isinstance(message, Challenge):
        reason = "it asks for a secret, and none was given: set security.secret_file (of a client: secret=)"
        return Refused(f"directory {address}: {reason}", denied=True)
    if isinstance(message, Rejected):
        return Refused(f"directory {address}: {message.reason}", denied=True)
    if isinstance(message, Greeting):
        reason = "it is a store node and no directory: give its address as a node"
        return Refused(f"directory {address}: {reason}", denied=False)
    return None
