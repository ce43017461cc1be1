"""Starts processes in stages, restarts what dies, stops them in order. One thread owns all of them.

**Covers** any set of ChildPlans. **Does not cover** what they are (`cluster.live.cluster`).

The supervising thread forks every child: the kernel ties a child's parent-death signal to the *thread* that forked it,
so this thread must live as long as its children.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from anabranch.cluster.live.child import Child, ChildPlan, ChildStatus
from anabranch.cluster.restart import RestartConfig
from anabranch.core.errors import Unavailable

READY_POLL_S = 0.05
STARTUP_TRIES = 3
REFUSED_CODE = 2
"""The exit code for wrong input: another try would end the same way."""
SPAWN_RETRY_S = 1.0
OnEvent = Callable[[str, str], None]


class Supervisor:
    """`on_change(statuses)` after every change of state, `on_event(child, message)` for what a person should read; both
    run on the supervising thread and must be quick."""

    def __init__(
        self,
        plans: Sequence[ChildPlan],
        log_dir: Path,
        *,
        restart: RestartConfig | None = None,
        on_change: Callable[[list[ChildStatus]], None] = lambda _: None,
        on_event: OnEvent = lambda _, __: None,
    ) -> None:
        self._children = [Child(plan, log_dir / f"{plan.name}.log", restart or RestartConfig()) for plan in plans]
        self._on_change = on_change
        self._on_event = on_event
        self._wake: int | None = None
        self._changed = threading.Condition()
        self._ready_names: set[tuple[str, int]] = set()
        self._stopping = False
        self._killing = False
        self._failure = ""
        self._statuses = [child.status() for child in self._children]
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self, *, timeout_s: float, cancelled: threading.Event | None = None) -> None:
        """Start everything and return when all are ready.

        Raises Unavailable, with everything stopped, when a child keeps failing before it was ever ready (the message
        ends with the tail of its log), or when the time is over. Returns early, still running, when `cancelled` is set.
        """
        deadline = time.monotonic() + timeout_s
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()
        with self._changed:
            while not self._failure and not all(status.state == "ready" for status in self._statuses):
                if cancelled is not None and cancelled.is_set():
                    return
                if time.monotonic() > deadline:
                    slow = ", ".join(s.name for s in self._statuses if s.state != "ready")
                    self._failure = f"not ready after {timeout_s:.0f} s: {slow}"
                self._changed.wait(0.1)
        if self._failure:
            self.stop()
            raise Unavailable(self._failure)

    def stop(self) -> None:
        """Stop stage by stage and return when every process is gone. Safe to call twice and from any thread."""
        self._stopping = True
        self._poke()
        if self._thread.is_alive():
            self._thread.join()

    def kill_all(self) -> None:
        """Cut a stop short: SIGKILL to everything. Returns at once."""
        self._killing = self._stopping = True
        self._poke()

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal to one child; returns the process id that got it (0: it is not running)."""
        child = next(child for child in self._children if child.plan.name == name)
        pid = child.pid
        child.signal(number)
        return pid

    @property
    def failure(self) -> str:
        """Why nothing is supervised any more, or why the start failed; "" while all is well."""
        return self._failure

    def statuses(self) -> list[ChildStatus]:
        return self._statuses

    def wait_until(self, condition: Callable[[list[ChildStatus]], bool], timeout_s: float) -> bool:
        """Wait for a condition on the statuses; False when the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._statuses), timeout_s)

    # --- the supervising thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._finished():
                self._act(time.monotonic())
                self._publish()
                self._sleep()
            self._publish()
        except BaseException as error:
            self._fail(f"the supervisor failed: {error!r}")
            raise
        finally:
            for child in self._children:
                if child.process is not None:
                    child.reap(time.monotonic())
            with self._changed:
                self._statuses = [child.status() for child in self._children]
                self._changed.notify_all()
            self._close_wake()

    def _finished(self) -> bool:
        return self._stopping and all(child.process is None for child in self._children)

    def _act(self, now: float) -> None:
        if self._stopping:
            self._advance_stop(now)
            return
        self._note_ready()
        self._advance_start(now)
        for child in self._children:
            if child.due is not None and child.due <= now:
                self._spawn(child, now)

    def _advance_start(self, now: float) -> None:
        """Open the lowest stage that has waiting children, once everything below it is ready."""
        waiting = [child for child in self._children if child.state == "waiting" and child.due is None]
        if not waiting:
            return
        stage = min(child.plan.start_stage for child in waiting)
        below = [child for child in self._children if child.plan.start_stage < stage]
        if all(child.state == "ready" for child in below):
            for child in waiting:
                if child.plan.start_stage == stage:
                    child.due = now

    def _spawn(self, child: Child, now: float) -> None:
        try:
            child.spawn(now, time.time())
        except OSError as error:
            if not child.ever_ready:
                self._fail(f"cannot start {child.plan.name}: {error}")
            self._on_event(child.plan.name, f"cannot be started ({error}); trying again")
            child.due = now + SPAWN_RETRY_S
            return
        threading.Thread(
            target=self._await_ready, args=(child, child.pid), name=f"{child.plan.name}-ready", daemon=True
        ).start()

    def _await_ready(self, child: Child, pid: int) -> None:
        """Poll the child's own answer on a thread that ends with this life of the child."""
        while not self._stopping and child.pid == pid:
            if child.plan.ready():
                self._ready_names.add((child.plan.name, pid))
                self._poke()
                return
            time.sleep(READY_POLL_S)

    def _note_ready(self) -> None:
        for child in self._children:
            if child.state == "starting" and (child.plan.name, child.pid) in self._ready_names:
                self._ready_names.discard((child.plan.name, child.pid))
                child.state = "ready"
                child.ever_ready = True
                if child.restarts:
                    self._on_event(child.plan.name, f"is back (process {child.pid})")

    def _died(self, child: Child, now: float) -> None:
        restart = child.reap(now)
        if self._stopping:
            child.state = "stopped"
            return
        if not child.ever_ready:
            child.failures_before_ready += 1
            if child.failures_before_ready >= STARTUP_TRIES or child.last_code == REFUSED_CODE:
                story = f"({child.last_exit}); {child.log_path} ends with:\n{child.log_tail()}"
                self._fail(f"{child.plan.name} cannot start {story}")
                child.state = "stopped"
                return
        child.restarts += 1
        child.state = "restarting"
        child.due = now + restart.delay_s
        self._on_event(child.plan.name, f"ended ({child.last_exit}); restarting")
        if restart.alarm:
            self._on_event(child.plan.name, f"keeps failing; its log ends with:\n{child.log_tail()}")

    def _fail(self, message: str) -> None:
        with self._changed:
            self._failure = self._failure or message
            self._changed.notify_all()

    def _advance_stop(self, now: float) -> None:
        running = [child for child in self._children if child.process is not None]
        stage = min((child.plan.stop_stage for child in running), default=0)
        for child in running:
            if self._killing:
                child.signal(signal.SIGKILL)
            elif child.plan.stop_stage == stage:
                self._stop_child(child, now)
        for child in self._children:
            child.due = None
            if child.process is None:
                child.state = "stopped"

    def _stop_child(self, child: Child, now: float) -> None:
        if child.stop_deadline is None:
            child.state = "stopping"
            child.stop_deadline = now + child.plan.grace_s
            child.signal(signal.SIGTERM)
            # A stopped (SIGSTOP) process would not see the request.
            child.signal(signal.SIGCONT)
        elif now >= child.stop_deadline:
            self._on_event(child.plan.name, f"did not stop within {child.plan.grace_s:g} s; killed")
            child.signal(signal.SIGKILL)
            child.stop_deadline = now + child.plan.grace_s

    def _sleep(self) -> None:
        """Until a child ends, somebody pokes, or a restart or a stop deadline is due."""
        poll = select.poll()
        wake = -1 if self._wake is None else self._wake
        poll.register(wake, select.POLLIN)
        owners = {child.pidfd: child for child in self._children if child.pidfd is not None}
        for descriptor in owners:
            poll.register(descriptor, select.POLLIN)
        dues = [due for child in self._children for due in (child.due, child.stop_deadline) if due is not None]
        wait = None if not dues else max(0.0, min(dues) - time.monotonic()) * 1000 + 1
        for descriptor, _ in poll.poll(wait):
            if descriptor == wake:
                os.eventfd_read(wake)
            else:
                child = owners[descriptor]
                child.stop_deadline = None
                self._died(child, time.monotonic())

    def _publish(self) -> None:
        statuses = [child.status() for child in self._children]
        if statuses != self._statuses:
            self._on_change(statuses)
        with self._changed:
            self._statuses = statuses
            self._changed.notify_all()

    def _poke(self) -> None:
        with self._changed:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    def _close_wake(self) -> None:
        """Under the lock: a late `_poke` must not write to a descriptor that has a new owner."""
        with self._changed:
            if self._wake is not None:
                os.close(self._wake)
            self._wake = None
