"""The folder of a running cluster: its lock, its spec, its state, its logs; and what dead clusters left behind.

<run_dir>/lock           held (flock) by the supervisor for as long as it lives; contains its process id
<run_dir>/cluster.json   ClusterSpec, 0600
<run_dir>/state.json     RunState, rewritten at every change
<run_dir>/logs/*.log     one per process
<run_dir>/*.sock
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import time
from pathlib import Path

import msgspec

from anabranch.cluster.live.child import ChildStatus
from anabranch.cluster.local import LOG_FOLDER, SPEC_FILE, STATE_FILE, arena_prefix
from anabranch.cluster.spec import ClusterConfig, ClusterSpec
from anabranch.core.errors import ConfigError, Unavailable
from anabranch.core.live.process import command_line, is_alive

LOCK_FILE = "lock"
LOCK_TRIES = 5


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What `anabranch status` reads."""

    name: str
    supervisor_pid: int
    url: str
    children: list[ChildStatus]


def default_run_dir(config: ClusterConfig) -> Path:
    """`cluster.run_dir`, or `anabranch/<name>` in the user's runtime folder, or `/tmp/anabranch-<uid>/<name>`."""
    if config.run_dir:
        return Path(config.run_dir).absolute()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "anabranch" / config.name
    return Path(f"/tmp/anabranch-{os.getuid()}") / config.name


def default_data_dir(config: ClusterConfig) -> Path:
    """`cluster.data_dir`, or `anabranch` in the user's cache folder."""
    if config.data_dir:
        return Path(config.data_dir).absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "anabranch"


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter. Raises ConfigError if somebody else owns it (or its /tmp parent)."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (path, path.parent) if path.parent.name.startswith("anabranch-") else (path,):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise ConfigError(f"{folder} belongs to another user; choose another folder with cluster.run_dir")
            folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {path}: {error.strerror}; set cluster.run_dir") from error


class RunFolder:
    """Exclusive ownership of a run folder between `acquire` and `release`."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._name = name
        self._lock: int | None = None

    def acquire(self) -> None:
        """Lock the folder and remove what a dead owner left. Raises ConfigError naming the process that holds it."""
        private_folder(self.path)
        self._lock = self._flock()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        self._end_orphans()
        self._remove_leftovers()
        (self.path / LOG_FOLDER).mkdir(mode=0o700)

    def release(self, *, keep_logs: bool = False) -> None:
        """Remove everything but (if asked to) the logs, and give the lock back."""
        if self._lock is None:
            return
        keep_logs = keep_logs and any((self.path / LOG_FOLDER).glob("*.log"))
        self._remove_leftovers(keep_logs=keep_logs)
        with contextlib.suppress(OSError):
            (self.path / LOCK_FILE).unlink()
        if not keep_logs:
            with contextlib.suppress(OSError):
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def write(self, name: str, content: msgspec.Struct) -> Path:
        """Write a JSON file atomically, readable by its owner alone."""
        target, fresh = self.path / name, self.path / f".{name}.new"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content)))
        fresh.replace(target)
        return target

    def arenas(self) -> list[str]:
        folders = ("/dev/shm", str(self.path))
        return [
            path
            for folder in folders
            for path in glob.glob(glob.escape(arena_prefix(str(self.path), self._name, os.getuid(), folder)) + "*")
        ]

    def _flock(self) -> int:
        attempt = 0
        while True:
            attempt += 1
            descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode() or "unknown"
                os.close(descriptor)
                if attempt <= LOCK_TRIES:
                    # `status` asks by taking a shared lock for a moment.
                    time.sleep(0.02)
                    continue
                raise ConfigError(
                    f"a cluster named '{self._name}' is already running (process {holder}); stop it with "
                    f"`anabranch down --name {self._name}`, or start another with --name"
                ) from None
            # A releasing owner unlinks the file: a lock on the unlinked file protects nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path / LOCK_FILE).st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def _end_orphans(self) -> None:
        """Children of a supervisor that was killed die with it; make sure that none is still around."""
        state = read_state(self.path)
        spec = str(self.path / SPEC_FILE)
        pids = [child.pid for child in state.children] if state is not None else []
        orphans = [pid for pid in pids if pid and spec in command_line(pid)]
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while any(is_alive(pid) for pid in orphans) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _remove_leftovers(self, *, keep_logs: bool = False) -> None:
        stale = [*self.path.glob("*.sock"), self.path / SPEC_FILE, self.path / STATE_FILE, *map(Path, self.arenas())]
        for path in [*stale, *self.path.glob(".*.new")]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        if not keep_logs and (self.path / LOG_FOLDER).exists():
            shutil.rmtree(self.path / LOG_FOLDER)


def read_state(path: Path) -> RunState | None:
    """The last written state; None if there is none (or it is of another version)."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((path / STATE_FILE).read_bytes(), type=RunState)
    return None


def read_spec(path: Path) -> ClusterSpec:
    """The spec in a file, or in a run folder. Raises ConfigError."""
    file = path / SPEC_FILE if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=ClusterSpec)
    except OSError as error:
        raise ConfigError(f"cannot read the cluster's spec {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is not a cluster spec: {error}") from error


def supervisor_pid(path: Path) -> int | None:
    """The process that holds the lock of a run folder; None when no cluster runs there."""
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.pread(descriptor, 32, 0) or b"0") or None
    finally:
        os.close(descriptor)
    return None


def remove_leftovers(path: Path, name: str) -> None:
    """Clean up after a cluster whose supervisor was killed. Raises ConfigError if it runs after all."""
    folder = RunFolder(path, name)
    folder.acquire()
    folder.release()


def stop_cluster(path: Path, name: str, *, timeout_s: float) -> int:
    """Ask the supervisor of a run folder to stop and wait until it has. Returns its process id.

    Raises Unavailable if no cluster runs there or it does not stop in time.
    """
    pid = supervisor_pid(path)
    if pid is None:
        raise Unavailable(f"no cluster named '{name}' is running")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while supervisor_pid(path) == pid:
        if time.monotonic() > deadline:
            raise Unavailable(f"cluster '{name}' (process {pid}) did not stop within {timeout_s:.0f} s")
        time.sleep(0.05)
    return pid
