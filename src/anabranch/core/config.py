"""Configuration: one frozen struct per section, values from layers, every value with its origin, all problems at once.

**Covers** merging, type conversion, ranges, unknown names, and the reference page. **Does not cover** reading files or
the environment (`core.live.environment`), which sections there are or what contradicts what (`cluster.settings`).

Layers, later ones win: defaults < file < environment < flags. Keys ending in `_bytes` take sizes ("512MiB"), keys
ending in `_s` take durations ("200ms"). Fields annotated with `msgspec.Meta` bring their range and description.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from anabranch.core.errors import ConfigError
from anabranch.core.fields import convert, expected, field_of, kind_of, mask, quoted, show

ENV_PREFIX = "ANABRANCH_"
SWITCHES = frozenset({"ANABRANCH_NATIVE", "ANABRANCH_STORE", "ANABRANCH_DIRECTORY"})
"""Variables that are read where they act (`core.live.native_build`) and are no settings."""
DEFAULT_ORIGIN = "default"
Sections = Mapping[str, type[msgspec.Struct]]


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What each process writes to its log (`<run_dir>/logs/<process>.log`)."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], msgspec.Meta(description="Least severe level written.")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], msgspec.Meta(description="Lines for people, or one JSON object a line.")
    ] = "text"


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """OpenTelemetry spans of a store node's requests; clients trace with `request_spans.trace_client`."""

    endpoint: Annotated[
        str, msgspec.Meta(description="OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces; empty = no spans.")
    ] = ""
    share: Annotated[
        float, msgspec.Meta(ge=0, le=1, description="Of the traces that begin here; a caller's own are followed.")
    ] = 0.01


class Entry(msgspec.Struct, frozen=True):
    """One value from one source. `value` is text unless the source is typed (TOML).

    `label`: how the source calls it."""

    section: str
    key: str
    value: Any
    origin: str
    label: str


class Resolved(msgspec.Struct, frozen=True):
    """The effective configuration. `problems` is empty exactly when it may be used."""

    sections: dict[str, msgspec.Struct]
    origins: dict[str, dict[str, str]]
    problems: list[str]

    def origin(self, section: str, key: str) -> str:
        return self.origins[section][key]


def refuse(problems: Iterable[str]) -> None:
    """Raise one ConfigError with a line for each problem; nothing if there is none."""
    lines = list(dict.fromkeys(problems))
    if lines:
        raise ConfigError("\n".join(lines))


def resolve(sections: Sections, entries: Iterable[Entry]) -> Resolved:
    """Merge entries (weakest first) over the defaults. A bad entry becomes a problem and leaves the weaker value."""
    values = {name: _defaults(struct) for name, struct in sections.items()}
    origins = {name: dict.fromkeys(keys, DEFAULT_ORIGIN) for name, keys in values.items()}
    problems: list[str] = []
    for entry in entries:
        field = _field(sections, entry, problems)
        if field is None:
            continue
        try:
            values[entry.section][entry.key] = convert(field, entry.value)
            origins[entry.section][entry.key] = entry.origin
        except ValueError as error:
            problems.append(f"{entry.label} = {quoted(entry.value)}: {error}")
    structs = {name: sections[name](**keys) for name, keys in values.items()}
    return Resolved(structs, origins, problems)


def flag_entry(sections: Sections, text: str) -> Entry | str:
    """`--set section.key=value` as an entry, or the problem with it."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot:
        return f"--set {text}: expected section.key=value, e.g. --set engine.threads=2"
    return Entry(section, key, value.strip(), f"--set {section}.{key}", f"--set {section}.{key}")


def environment_name(section: str, key: str) -> str:
    return f"{ENV_PREFIX}{section}_{key}".upper()


def environment_entries(sections: Sections, variables: Mapping[str, str]) -> tuple[list[Entry], list[str]]:
    """Every ANABRANCH_* variable as an entry; unknown ones as problems naming the nearest valid variable."""
    known = {environment_name(name, key): (name, key) for name, struct in sections.items() for key in _names(struct)}
    entries, problems = [], []
    for variable in sorted(variables):
        if not variable.startswith(ENV_PREFIX) or variable in SWITCHES:
            continue
        if variable not in known:
            problems.append(f"unknown environment variable {variable}{_nearest(variable, known)}")
            continue
        entries.append(Entry(*known[variable], variables[variable], variable, variable))
    return entries, problems


def file_entries(table: Mapping[str, Any], origin: str) -> tuple[list[Entry], list[str]]:
    """The entries of a parsed TOML document."""
    entries, problems = [], []
    for section, keys in table.items():
        if not isinstance(keys, Mapping):
            problems.append(f"{section} in {origin}: expected a table, e.g. [{section}]")
            continue
        entries += [Entry(section, key, value, origin, f"{section}.{key} in {origin}") for key, value in keys.items()]
    return entries, problems


# --- showing ----------------------------------------------------------------------------------------------------


def rows(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(section.key, value, origin) of everything, secrets masked."""
    return [
        (f"{name}.{key}", show(key, getattr(struct, key)), resolved.origins[name][key])
        for name, struct in resolved.sections.items()
        for key in _names(type(struct))
    ]


def masked(resolved: Resolved) -> dict[str, dict[str, dict[str, Any]]]:
    """{section: {key: {value, origin}}} of plain values, secrets masked."""
    return {
        name: {
            key: {"value": mask(key, getattr(struct, key)), "origin": resolved.origins[name][key]}
            for key in _names(type(struct))
        }
        for name, struct in resolved.sections.items()
    }


def markdown(sections: Sections) -> str:
    """The reference page, entirely from the structs."""
    parts = [_HEAD]
    for name, struct in sections.items():
        parts.append(f"\n## [{name}]\n\n{inspect.cleandoc(struct.__doc__ or '')}\n")
        parts.append("| key | type | default | environment | meaning |\n|---|---|---|---|---|")
        for field in msgspec.structs.fields(struct):
            kind, meta = kind_of(field_of(struct, field.name))
            default = show(field.name, field.default).replace("|", "\\|")
            parts.append(
                f"| `{field.name}` | {expected(field.name, kind)} | `{default}` "
                f"| `{environment_name(name, field.name)}` | {meta} |"
            )
    return "\n".join(parts) + "\n"


_HEAD = """# Configuration

Generated from the settings structs by `anabranch config --markdown`; do not edit.

Sources, later ones win: defaults, the TOML file (`anabranch.toml` in the current directory, or `--config FILE`), the
environment, flags (`--set section.key=value` and the named flags of `anabranch up`). An unknown name is refused with
the nearest valid one, and all problems of a configuration are reported together. `anabranch config` prints the
effective values and where each comes from.

Sizes take units (`512MiB`, `4GB`), durations too (`1.5s`, `200ms`)."""


# --- fields -----------------------------------------------------------------------------------------------------


def _names(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return struct.__struct_fields__


def _defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(struct(), name) for name in _names(struct)}


def _field(sections: Sections, entry: Entry, problems: list[str]) -> msgspec.inspect.Field | None:
    struct = sections.get(entry.section)
    if struct is None:
        problems.append(f"{entry.label}: unknown section [{entry.section}]{_nearest(entry.section, sections)}")
        return None
    if entry.key not in _names(struct):
        problems.append(f"{entry.label}: unknown key '{entry.key}'{_nearest_key(sections, entry)}")
        return None
    return field_of(struct, entry.key)


def _nearest(name: str, valid: Iterable[str]) -> str:
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; valid: {', '.join(names[:12])}"


def _nearest_key(sections: Sections, entry: Entry) -> str:
    """Prefer a near name in the same section, then the same name in another section."""
    own = _names(sections[entry.section])
    if near := difflib.get_close_matches(entry.key, own, n=1):
        return f"; did you mean '{near[0]}'?"
    for name, struct in sections.items():
        if entry.key in _names(struct):
            return f"; did you mean '{name}.{entry.key}'?"
    return _nearest(entry.key, own)
