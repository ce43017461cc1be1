"""Reads configuration from where it lives: the TOML file, the environment, the flags."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from anabranch.core.config import (
    Entry,
    Resolved,
    Sections,
    environment_entries,
    file_entries,
    flag_entry,
    resolve,
)

DEFAULT_FILE = "anabranch.toml"


def gather(
    sections: Sections,
    *,
    file: str | None,
    variables: Mapping[str, str],
    sets: Iterable[str] = (),
    flags: Iterable[Entry] = (),
    directory: str = ".",
) -> Resolved:
    """Defaults < file < environment < `--set` < named flags. Bad values are in `Resolved.problems`."""
    entries, problems = read_file(file, directory)
    found, unknown = environment_entries(sections, variables)
    entries += found
    problems += unknown
    for text in sets:
        parsed = flag_entry(sections, text)
        if isinstance(parsed, str):
            problems.append(parsed)
        else:
            entries.append(parsed)
    resolved = resolve(sections, [*entries, *flags])
    return Resolved(resolved.sections, resolved.origins, problems + resolved.problems)


def read_file(file: str | None, directory: str = ".") -> tuple[list[Entry], list[str]]:
    """The entries of `file`, or of `anabranch.toml` in `directory` when there is one."""
    path = Path(file) if file is not None else Path(directory) / DEFAULT_FILE
    if file is None and not path.exists():
        return [], []
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return [], [f"cannot read the configuration file {path}: {error.strerror}"]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return [], [f"{path} is not valid TOML: {error}"]
    return file_entries(table, str(path) if file is not None else DEFAULT_FILE)
