"""What `anabranch up` shows: progress while it prepares and starts, then where to send a request."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anabranch.cluster.live.child import ChildStatus
from anabranch.cluster.spec import ClusterSpec

_STYLES = {"ready": "green", "starting": "yellow", "restarting": "red", "waiting": "dim", "stopping": "yellow"}
CURL = """curl {url}/v1/chat/completions -H 'content-type: application/json' {auth}\\
  -d '{{"model": "{model}", "max_tokens": 100, "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'"""


class LastingStream(io.TextIOBase):
    """A text stream that swallows what its other end no longer takes: a terminal that was closed, a pipe whose reader
    ended or a full disk is no reason to stop serving."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has it as an attribute
        return self._stream.encoding if self._stream is not None else "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("the stream is closed")
        return self._stream.fileno()


def lasting_console() -> Console:
    """Standard error, for as long as somebody reads it."""
    return Console(file=LastingStream(sys.stderr))  # type: ignore[arg-type]  # a TextIOBase is what rich needs


class StartDisplay:
    """A live table on a terminal, one line a change elsewhere. Methods may be called from any thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._seen: Counter[str] = Counter()

    def preparing(self, stage: str, fraction: float) -> None:
        """Progress of the model's one-time preparation."""
        if not self._console.is_terminal:
            if self._seen[stage] == 0:
                self._console.print(f"preparing the model: {stage}", markup=False)
            self._seen[stage] += 1
            return
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console)
            self._progress.start()
            self._progress.add_task("preparing the model (once)", total=1.0)
        self._progress.update(self._progress.task_ids[0], completed=fraction, description=f"model: {stage}")

    def changed(self, statuses: list[ChildStatus]) -> None:
        self._end_progress()
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        table = Table.grid(padding=(0, 2))
        for status in statuses:
            style = _STYLES.get(status.state, "")
            table.add_row(status.name, f"[{style}]{status.state}[/{style}]" if style else status.state)
        self._live.update(table)

    def close(self) -> None:
        self._end_progress()
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _end_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()


def announce(console: Console, spec: ClusterSpec, url: str, model: str, took_s: float) -> None:
    """Where it serves, what it serves, and a request to copy."""
    roles = Counter(member.role for member in spec.members)
    engines = " + ".join(f"{count} {role}" for role, count in roles.items())
    auth = '-H "authorization: Bearer $KEY" ' if spec.gateway.api_keys_file else ""
    console.print(f"[bold green]ready[/bold green] in {took_s:.1f} s: {engines}", highlight=False)
    console.print(f"  url    [bold]{url}/v1[/bold]\n  model  [bold]{model}[/bold]", highlight=False)
    console.print(f"  logs   {spec.run_dir}/logs\n", highlight=False, markup=False, soft_wrap=True)
    console.print(CURL.format(url=url, model=model, auth=auth), highlight=False, markup=False, soft_wrap=True)
    console.print("\nCtrl-C stops it.", highlight=False)


class LogFollower:
    """Copies what the children write to their logs to the console, line by line, until closed."""

    def __init__(self, console: Console, folder: Path) -> None:
        self._console = console
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(0.2):
            self._copy()

    def _copy(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            # A stopping cluster removes its folder.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                self._print(path, file.read(1 << 20))

    def _print(self, path: Path, data: bytes) -> None:
        """Whole lines only; the rest of a line comes with the next copy."""
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + whole
        for line in data[:whole].decode(errors="replace").splitlines():
            self._console.print(f"{path.stem:<14} {line}", markup=False, highlight=False, soft_wrap=True)
