"""The first words on a lane: Greeting → Hello → Welcome or Denied, for both sides.

Pure: nonces and sessions are passed in (`secrets.token_bytes(NONCE_BYTES)` where they are made). Each lane has its own
nonces; a client uses one `session` on all its lanes.
"""

from __future__ import annotations

from anabranch.core.authentication import Access, Caller, Credentials, Denial, answer, confirms, hello_proof
from anabranch.core.errors import AccessDenied, WireError
from anabranch.store.values.messages import PROTOCOL, Denied, Greeting, Hello, Welcome
from anabranch.transfer.classes import TrafficClass


def hello(
    credentials: Credentials,
    greeting: Greeting,
    session: bytes,
    nonce: bytes,
    *,
    name: str = "",
    traffic: TrafficClass = TrafficClass.LOAD,
) -> Hello:
    """A client's answer to a greeting. Raises AccessDenied if the client has a secret that the node does not ask for
    (it is open, or somebody else), WireError if the two speak different protocols."""
    if greeting.protocol != PROTOCOL:
        raise WireError(f"node {greeting.node_id} speaks protocol {greeting.protocol}, this client {PROTOCOL}")
    if credentials.secret and not greeting.authenticate:
        raise AccessDenied(
            f"node {greeting.node_id} asks for no secret, this client has one: set security.secret_file there too"
        )
    who = (credentials.tenant, credentials.namespace, credentials.epoch)
    proof = hello_proof(credentials.secret, greeting.nonce, nonce, session, *who) if credentials.secret else b""
    return Hello(
        session=session,
        nonce=nonce,
        tenant=credentials.tenant,
        namespace=credentials.namespace,
        epoch=credentials.epoch,
        proof=proof,
        name=name,
        traffic=traffic,
    )


def admitted(credentials: Credentials, greeting: Greeting, sent: Hello, reply: Welcome | Denied) -> Welcome:
    """The node's Welcome if it is one and the node knows the secret too. Raises AccessDenied."""
    if isinstance(reply, Denied):
        raise AccessDenied(f"node {greeting.node_id}: {reply.reason}")
    if credentials.secret and not confirms(credentials.secret, greeting.nonce, sent, reply.proof):
        raise AccessDenied(f"node {greeting.node_id} does not know this client's secret")
    return reply


def admit(access: Access, greeting: Greeting, received: Hello, certificate: str = "") -> tuple[Caller, bytes] | Denied:
    """A node's decision: the caller and the proof for its Welcome, or the last message of this lane."""
    if received.protocol != PROTOCOL:
        reason = f"this node speaks protocol {PROTOCOL}, the client {received.protocol}"
        return Denied(reason=reason, code="wire_error")
    caller = access.check(received, greeting.nonce, certificate)
    if isinstance(caller, Denial):
        return Denied(reason=caller.reason, code=caller.code)
    return caller, answer(caller, greeting.nonce, received)


def traffic_of(received: Hello, caller: Caller) -> TrafficClass:
    """The class of what a lane moves: what the caller says, but a stranger is not more urgent than a load."""
    if received.traffic not in set(TrafficClass):
        return TrafficClass.LOAD
    return TrafficClass(received.traffic if caller.trusted else max(received.traffic, TrafficClass.LOAD))
