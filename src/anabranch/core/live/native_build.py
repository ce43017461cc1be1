"""C that a package ships, compiled for this processor at first use and kept.

**Covers** finding the compiler, building once per cache folder however many processes start together, a folder for the
results, and the switch ANABRANCH_NATIVE=0. **Does not cover** what the C does: each user has a twin in plain Python
(or torch) that gives the same results where `load` answers with a reason.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from blake3 import blake3

COMPILE = ("-O3", "-std=gnu11", "-pthread", "-fPIC", "-shared", "-fno-math-errno")
SWITCH = "ANABRANCH_NATIVE"
TIMEOUT_S = 120.0
log = logging.getLogger(__name__)


def load(package: str, sources: Sequence[str], cache_dir: Path) -> ctypes.CDLL | str:
    """The library built from `sources` of `package` (the first is compiled, it includes the others), or why there is
    none: no compiler, or a processor or compiler that cannot build it."""
    target = build(package, sources, cache_dir)
    if isinstance(target, str):
        return target
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        return f"the compiled {target.name} cannot be loaded: {error}"


def load_short_calls(package: str, sources: Sequence[str]) -> ctypes.PyDLL | None:
    """Like `load`, from `default_cache`, for functions that run for microseconds: they keep the interpreter's lock, so
    each call is atomic among this process's threads. None (logged, once per process and package at most, if the
    caller keeps the answer): use the twin."""
    if os.environ.get(SWITCH) == "0":
        return None
    target = build(package, sources, default_cache())
    if not isinstance(target, str):
        try:
            return ctypes.PyDLL(str(target))
        except OSError as error:
            target = f"{target.name} cannot be loaded: {error}"
    log.warning("compiled %s is not used (%s); plain Python is slower", sources[0], target)
    return None


def build(package: str, sources: Sequence[str], cache_dir: Path) -> Path | str:
    """The shared object in `cache_dir`, built if it is not there yet, or why it cannot be."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler (cc) was found"
    texts = {name: resources.files(package).joinpath(name).read_bytes() for name in sources}
    settings = "\0".join((compiler, *COMPILE, _processor())).encode()
    name = blake3(b"\0".join((*texts.values(), settings))).hexdigest()[:16]
    target = cache_dir / f"{Path(sources[0]).stem}-{name}.so"
    if not target.is_file():
        problem = _compile(compiler, texts, target)
        if problem:
            return problem
    return target


def default_cache() -> Path:
    """`anabranch/native` in the user's cache folder if it can be written, else a private folder of this user among the
    temporary files; a new one for this process if somebody else owns that."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "anabranch" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _ours(folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        log.debug("no cache folder for compiled code in the user's home")
    folder = Path(tempfile.gettempdir()) / f"anabranch-native-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        log.debug("cannot create %s: %s", folder, error)
    return folder if _ours(folder) else Path(tempfile.mkdtemp(prefix="anabranch-native-"))


def _ours(folder: Path) -> bool:
    """Nobody else (but root) can put code there, and this process can."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return private and os.access(folder, os.W_OK | os.X_OK)


def _compile(compiler: str, texts: dict[str, bytes], target: Path) -> str:
    """ "" or what went wrong. Published by a rename, so several processes may build at once."""
    main = next(iter(texts))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.stem}-") as folder:
            for name, text in texts.items():
                Path(folder, name).write_bytes(text)
            built = Path(folder, "built.so")
            native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
            command = [*shlex.split(compiler), *COMPILE, native, str(Path(folder, main)), "-o", str(built), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
            built.rename(target)
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {(error.stderr or '').strip().splitlines()[:1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} failed: {error}"
    return ""


def _processor() -> str:
    """Tells processors with different instruction sets apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
