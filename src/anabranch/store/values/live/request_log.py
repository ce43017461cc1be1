"""Log lines of what a node was told to do, with what names the cause: the caller's session and its operation, as in its
spans (`request_spans`) and messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from anabranch.store.values.live.node_custody import NodeSession
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.messages import Denied, Drain, Hello, Invalidate, Verify

LOGGED: tuple[type, ...] = (Invalidate, Drain, Verify)
"""Rare and of consequence. Puts and gets are counted (`values.ledger`), not logged."""
log = logging.getLogger(__name__)
Answer = Callable[[NodeLane, NodeSession, Any], Any]


def logged(node_id: str, name: str, answer: Answer) -> Answer:
    """The same handler, with a line once it has answered or failed."""

    def spoken(lane: NodeLane, session: NodeSession, message: Any) -> Any:
        began = time.monotonic()
        fields = {"node": node_id, "session": session.id[0].hex(), "op": message.op, "tenant": session.caller.tenant}
        if isinstance(message, Invalidate):
            fields |= {"of_tenant": message.tenant or session.caller.tenant, "epoch": message.epoch}
        try:
            result = answer(lane, session, message)
        except Exception as error:
            log.warning("%s failed", name, extra={**fields, "error": str(error)})
            raise
        log.info("%s done", name, extra={**fields, "took_s": round(time.monotonic() - began, 3)})
        return result

    return spoken


def refused(node_id: str, peer: str, hello: Hello, answer: Denied) -> None:
    """A caller that was not let in. What it says of itself may be anything."""
    claims = {"session": hello.session[:16].hex(), "tenant": hello.tenant[:64], "caller": hello.name[:64]}
    log.warning("caller not let in", extra={"node": node_id, "peer": peer, **claims, "reason": answer.reason})
