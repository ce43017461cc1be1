"""Compile the kernels for this processor, once per cache directory.

**See also** `kernels.c`, `pool.h`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from blake3 import blake3

COMPILE = ("-O3", "-std=gnu11", "-pthread", "-fPIC", "-shared", "-fno-math-errno")
SOURCES = ("kernels.c", "pool.h")
TIMEOUT_S = 120.0


def load(cache_dir: Path) -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none: no compiler, or a processor or compiler that cannot build them."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler (cc) was found"
    sources = {name: resources.files(__package__).joinpath(name).read_bytes() for name in SOURCES}
    settings = "\0".join((compiler, *COMPILE, _processor())).encode()
    name = blake3(b"\0".join((*sources.values(), settings))).hexdigest()[:16]
    target = cache_dir / f"kernels-{name}.so"
    if not target.is_file():
        problem = _build(compiler, sources, target)
        if problem:
            return problem
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        return f"the compiled kernels cannot be loaded: {error}"


def _build(compiler: str, sources: dict[str, bytes], target: Path) -> str:
    """ "" or what went wrong. Published by a rename, so several processes may build at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kernels-") as folder:
            for name, text in sources.items():
                Path(folder, name).write_bytes(text)
            built = Path(folder, "kernels.so")
            native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
            command = [*shlex.split(compiler), *COMPILE, native, str(Path(folder, SOURCES[0])), "-o", str(built), "-lm"]
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
