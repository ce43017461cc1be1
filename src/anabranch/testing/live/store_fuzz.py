"""A campaign of hostile frames against a node or a directory that runs as a process of its own.

Two tenants and the cluster have secrets. The attacker is tenant a, somebody without a secret, or somebody with a wrong
one; it knows names, scopes, puts and leases of tenant b, whose values are full of a mark that must never come back.
Tenant b works beside it: its calls must go on to succeed.
"""

from __future__ import annotations

import random
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from anabranch.core.authentication import Credentials
from anabranch.core.errors import AnabranchError
from anabranch.core.handshake import Challenge
from anabranch.core.live.handshake import client_handshake
from anabranch.core.messages import Message
from anabranch.core.wire import HEADER, encode
from anabranch.store.values.introduction import hello
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.session import Session
from anabranch.store.values.messages import (
    Abandon,
    Found,
    Get,
    Granted,
    Greeting,
    Hello,
    NodeToClient,
    Offer,
    Put,
    Return,
    Stored,
    Welcome,
)
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import NAME_BYTES, Scope, name_of
from anabranch.store.values.slices import slice_sums
from anabranch.testing.frames import Mutator, framed
from anabranch.testing.live.attacker import Attacker, FuzzReport, resident_bytes
from anabranch.testing.store_frames import DirectoryMessages, Known, NodeMessages, raw_bytes

MARK = b"belongs to tenant b"
VALUE_BYTES = 8192
LARGE_BYTES = 1_200_000
VICTIM_KEYS = 20
WARM_BURSTS = 300
CHECK_BURSTS = 50
CALL_S = 10.0
QUOTA_BYTES = 16 << 20
"""Of the attacker, so that it cannot starve the others of room."""
OPENED = 8
"""Puts and leases that tenant b has open."""
OWN_SHARE = 8
"""Of its KEPT numbers, how many an attacker's newest put or lease takes."""


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    a: bytes
    b: bytes
    cluster: bytes

    @classmethod
    def fresh(cls) -> Secrets:
        return cls(a=_secret(), b=_secret(), cluster=_secret())

    def write(self, folder: Path) -> tuple[Path, Path]:
        """(tenants file, cluster's secret file), private."""
        tenants, cluster = folder / "tenants.toml", folder / "secret"
        for path in (tenants, cluster):
            path.touch(mode=0o600)
        tables = [f'[{name}]\nsecret = "{getattr(self, name).decode()}"\n' for name in ("a", "b")]
        tenants.write_text(tables[0] + f"quota_bytes = {QUOTA_BYTES}\n" + tables[1])
        cluster.write_bytes(self.cluster)
        return tenants, cluster


class FuzzResult(msgspec.Struct, kw_only=True):
    """`grown_bytes`: of the target's anonymous memory since it was warm. `alive` False: it ended. `starved`: calls of
    tenant b that failed or took too long; `spoiled`: its values that were wrong or gone."""

    report: FuzzReport
    seconds: float = 0.0
    grown_bytes: int = 0
    alive: bool = True
    starved: list[str] = []
    spoiled: list[str] = []

    @property
    def problems(self) -> list[str]:
        found = [f"leaked {one}" for one in self.report.leaked] + self.starved + self.spoiled
        if not self.alive:
            found.append("the target ended")
        if self.report.hung:
            found.append(f"{self.report.hung} connections were not closed")
        return found


def fuzz_node(
    address: str,
    pid: int,
    secret: Secrets,
    *,
    frames: int,
    seed: int,
    progress: Callable[[FuzzResult], None] = lambda result: None,
) -> FuzzResult:
    pick = random.Random(seed)
    bystander = Bystander(address, secret)
    salt = bystander.welcome(Credentials(secret=secret.a, tenant="a")).salt
    own = Scope("a").name_key(salt)
    known = Known(
        names=[name_of(f"own/{number}", own) for number in range(40)],
        foreign=bystander.names,
        scopes=[Scope("a").digest(), Scope("b").digest()],
    )
    result = FuzzResult(report=FuzzReport())
    attacker = Attacker(
        address,
        Mutator(seed, NodeMessages(known).makers()),
        pick,
        result.report,
        introduce=NodeIntroductions(secret, known).play,
        trailer=raw_bytes,
        secret=MARK,
    )
    _run(attacker, pid, frames, result, progress, lambda: bystander.work(known, result))
    bystander.close()
    return result


def fuzz_directory(
    address: str,
    pid: int,
    secret: Secrets,
    *,
    frames: int,
    seed: int,
    progress: Callable[[FuzzResult], None] = lambda result: None,
) -> FuzzResult:
    pick = random.Random(seed)
    names = [pick.randbytes(NAME_BYTES) for _ in range(200)]
    result = FuzzResult(report=FuzzReport())
    attacker = Attacker(
        address,
        Mutator(seed, DirectoryMessages(names).makers()),
        pick,
        result.report,
        introduce=DirectoryIntroductions(secret).play,
    )
    _run(attacker, pid, frames, result, progress, lambda: None)
    return result


def _run(
    attacker: Attacker,
    pid: int,
    frames: int,
    result: FuzzResult,
    progress: Callable[[FuzzResult], None],
    check: Callable[[], None],
) -> None:
    began, base, bursts = time.monotonic(), 0, 0
    try:
        check()
        while result.report.total < frames and result.alive:
            attacker.burst()
            bursts += 1
            if bursts % CHECK_BURSTS == 0 or result.report.total >= frames:
                check()
                memory = resident_bytes(pid)
                result.alive = memory > 0
                base = memory if bursts <= WARM_BURSTS else base
                result.grown_bytes = memory - base
                progress(result)
    finally:
        attacker.close()
        result.seconds = time.monotonic() - began


class NodeIntroductions:
    """First words to a node. Every third caller that is let in opens a put and a lease of its own first."""

    def __init__(self, secret: Secrets, known: Known) -> None:
        self._secret = secret
        self._known = known
        self._session = secrets.token_bytes(16)

    def play(self, sock: socket.socket, pick: random.Random) -> str:
        """What was played."""
        draw = pick.random()
        if draw < 0.08:
            return "none"
        greeting = _read(sock, Greeting | NodeToClient)
        if not isinstance(greeting, Greeting):
            return "no greeting"
        session = self._session if pick.random() < 0.7 else pick.randbytes(16)
        good = hello(Credentials(secret=self._secret.a, tenant="a"), greeting, session, pick.randbytes(16))
        if draw < 0.78:
            sock.sendall(encode(good))
            if not isinstance(_read(sock, NodeToClient), Welcome):
                return "tenant a was refused"
            return self._open(sock, pick) if pick.random() < 0.3 else "tenant a"
        how, sent = self._bad(good, greeting, pick)
        sock.sendall(sent)
        return how

    def _open(self, sock: socket.socket, pick: random.Random) -> str:
        known = self._known
        offer = Offer(
            op=1, names=pick.choice(known.names), sizes=[pick.choice((100, LARGE_BYTES))], replicas=1, wait_s=0
        )
        sock.sendall(encode(offer) + encode(Get(op=2, names=pick.choice(known.names))))
        granted = _read(sock, NodeToClient)
        if isinstance(granted, Granted) and granted.put:
            known.puts.extend([granted.put] * OWN_SHARE)
        found = _read(sock, NodeToClient)
        if isinstance(found, Found) and found.lease:
            known.leases.extend([found.lease] * OWN_SHARE)
        return "tenant a with a put or a lease"

    def _bad(self, good: Hello, greeting: Greeting, pick: random.Random) -> tuple[str, bytes]:
        match pick.randrange(5):
            case 0:
                return "another tenant", encode(msgspec.structs.replace(good, tenant="b"))
            case 1:
                return "no proof", encode(msgspec.structs.replace(good, proof=b""))
            case 2:
                return "wrong proof", encode(msgspec.structs.replace(good, proof=pick.randbytes(len(good.proof))))
            case 3:
                stale = msgspec.structs.replace(greeting, nonce=pick.randbytes(len(greeting.nonce)))
                credentials = Credentials(secret=self._secret.a, tenant="a")
                return "replayed proof", encode(hello(credentials, stale, good.session, good.nonce))
            case _:
                return "hostile hello", Mutator(pick.getrandbits(32), [lambda _: good]).next().data


class DirectoryIntroductions:
    """First words to a directory."""

    def __init__(self, secret: Secrets) -> None:
        self._secret = secret

    def play(self, sock: socket.socket, pick: random.Random) -> str:
        draw = pick.random()
        if draw < 0.1:
            return "none"
        if draw < 0.2:
            challenge = _read(sock, Challenge)
            sock.sendall(framed(pick.randbytes(pick.randint(0, 300))))
            return "garbage" if challenge is not None else "no challenge"
        who, name = pick.choice(
            (
                (Credentials(secret=self._secret.cluster), "node"),
                (Credentials(secret=self._secret.cluster), "node"),
                (Credentials(secret=self._secret.a, tenant="a"), "tenant"),
                (Credentials(secret=self._secret.a, tenant="b"), "another tenant"),
                (Credentials(secret=pick.randbytes(32)), "wrong secret"),
            )
        )
        try:
            client_handshake(sock, who, timeout_s=CALL_S)
            sock.settimeout(CALL_S)
        except AnabranchError:
            return f"{name}: refused"
        return name


class Bystander:
    """Tenant b at work: values that stay, leases and puts that are open while others guess at them."""

    def __init__(self, address: str, secret: Secrets) -> None:
        self._address = address
        self._credentials = Credentials(secret=secret.b, tenant="b")
        welcome = self._connect()
        key = Scope("b").name_key(welcome.salt)
        self.names = [name_of(f"secret/{number}", key) for number in range(VICTIM_KEYS)]
        self._values = [self._value(number) for number in range(VICTIM_KEYS)]
        self._op = 0

    def close(self) -> None:
        self._lane.close()

    def _connect(self) -> Welcome:
        self._lane, welcome = Session(self._credentials).open(self._address, CALL_S, time.monotonic() + CALL_S)
        self._opened: list[Abandon | Return] = []
        return welcome

    def welcome(self, credentials: Credentials) -> Welcome:
        lane, welcome = Session(credentials).open(self._address, CALL_S, time.monotonic() + CALL_S)
        lane.close()
        return welcome

    def work(self, known: Known, result: FuzzResult) -> None:
        """Put what is not there, read everything, leave a put and a lease open and tell the attacker their numbers."""
        began = time.monotonic()
        try:
            self._lane.until(began + CALL_S)
            self._restore(result)
            self._open(known)
        except AnabranchError as error:
            result.starved.append(f"tenant b: {error}")
            self._lane.close()
            self._connect()
        spent = time.monotonic() - began
        if spent > CALL_S:
            result.starved.append(f"tenant b waited {spent:.1f} s")

    def _restore(self, result: FuzzResult) -> None:
        lane = self._lane
        for number, (name, value) in enumerate(zip(self.names, self._values, strict=True)):
            offer = Offer(op=self._next(), names=name, sizes=[len(value)], replicas=1)
            lane.send(Put(offer=offer, sums=slice_sums(value)), payload=[memoryview(value)])
            stored = _expect(lane, Stored)
            if not Outcome(stored.outcomes[0]).stored:
                result.spoiled.append(f"put of value {number}: {Outcome(stored.outcomes[0]).name}")
        lane.send(Get(op=self._next(), names=b"".join(self.names), limit=1 << 20))
        found = _expect(lane, Found)
        sizes = iter(found.sizes)
        for value, outcome in zip(self._values, found.outcomes, strict=True):
            if outcome == Outcome.OK:
                data = bytearray(next(sizes))
                lane.receive_bytes(memoryview(data))
                if data != value:
                    result.spoiled.append(f"{len(data)} bytes came back that are not the value")
            elif outcome != Outcome.MISSING:  # the attacker fills the arena too
                result.spoiled.append(f"a value is {Outcome(outcome).name}")

    def _open(self, known: Known) -> None:
        lane = self._lane
        large = name_of(f"large/{self._op}", bytes(32))
        lane.send(Offer(op=self._next(), names=large, sizes=[LARGE_BYTES], replicas=1, wait_s=0))
        if put := _expect(lane, Granted).put:
            self._opened.append(Abandon(put=put))
            known.puts.append(put)
        lane.send(Get(op=self._next(), names=b"".join(self.names[:4]), limit=0))
        if lease := _expect(lane, Found).lease:
            self._opened.append(Return(lease=lease))
            known.leases.append(lease)
        while len(self._opened) > OPENED:
            lane.send(self._opened.pop(0))

    def _value(self, number: int) -> bytes:
        return (MARK + str(number).encode()) * (VALUE_BYTES // 32)

    def _next(self) -> int:
        self._op += 1
        return self._op


M = TypeVar("M", bound=Message)


def _expect(lane: Lane, kind: type[M]) -> M:
    reply = lane.receive()
    if not isinstance(reply, kind):
        raise AnabranchError(f"a {type(reply).__name__} instead of a {kind.__name__}")
    return reply


def _read(sock: socket.socket, union: object) -> object:
    """One message, None if the connection ends first."""
    head = sock.recv(HEADER.size, socket.MSG_WAITALL)
    if len(head) < HEADER.size:
        return None
    body = sock.recv(HEADER.unpack(head)[0], socket.MSG_WAITALL)
    message: object = msgspec.msgpack.decode(body, type=union)
    return message


def _secret() -> bytes:
    return secrets.token_hex(32).encode()
