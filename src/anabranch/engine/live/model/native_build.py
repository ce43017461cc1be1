"""Compile the kernels for this processor, once per cache directory.

The object is linked without an OpenMP library of its own: its symbols bind to the one that torch has loaded, so
both share one thread pool.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import torch  # noqa: F401  (loads OpenMP, whose symbols the kernels bind to)
from blake3 import blake3

COMPILE = ("-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-fno-math-errno", "-c")
TIMEOUT_S = 120.0


def load(cache_dir: Path) -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none: no compiler, or a processor or compiler that cannot build them."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler (cc) was found"
    source = resources.files(__package__).joinpath("kernels.c").read_bytes()
    name = blake3(source + compiler.encode() + _processor().encode()).hexdigest()[:16]
    target = cache_dir / f"kernels-{name}.so"
    if not target.is_file():
        problem = _build(compiler, source, target)
        if problem:
            return problem
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        return f"the compiled kernels cannot be loaded: {error}"


def _build(compiler: str, source: bytes, target: Path) -> str:
    """ "" or what went wrong. Published by a rename, so several processes may build at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kernels-") as folder:
            code, built = Path(folder, "kernels.o"), Path(folder, "kernels.so")
            Path(folder, "kernels.c").write_bytes(source)
            flags = (*COMPILE, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native")
            _run([compiler, *flags, str(Path(folder, "kernels.c")), "-o", str(code)])
            _run([compiler, "-shared", str(code), "-o", str(built), "-lm"])
            built.rename(target)
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {(error.stderr or '').strip().splitlines()[:1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} failed: {error}"
    return ""


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)


def _processor() -> str:
    """Tells processors with different instruction sets apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
