"""Which request fields the API knows, and what it does with each.

**Covers** the three groups that are not parsed: fields accepted and ignored, fields refused unless neutral, and
everything else (unknown: refused with the nearest valid name).
**See also** `serving.openai`, which parses the rest.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from anabranch.core.errors import RequestError

# Bookkeeping of the caller, or hints that cannot change the answer.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "prediction",
        "parallel_tool_calls",
    }
)

# Features this server lacks. A value listed here means "not used" and is accepted; null always is.
NEUTRAL_ANY: dict[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **NEUTRAL_ANY,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {**NEUTRAL_ANY, "response_format": ({"type": "text"},)}


def check_fields(body: Mapping[str, Any], parsed: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RequestError for an unknown field, or for a feature that is not supported."""
    for name, value in body.items():
        if name in parsed or name in IGNORED:
            continue
        if name not in neutral:
            name = name[:100]
            known = sorted({*parsed, *IGNORED, *neutral})
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise RequestError(f"unknown field '{name}'{hint}", param=name, code="unknown_parameter")
        if value is not None and not any(value == ok and type(value) is type(ok) for ok in neutral[name]):
            accepted = ", ".join(repr(ok) for ok in neutral[name]) or "null"
            raise RequestError(
                f"'{name}' is not supported by this server; leave it out or send {accepted}",
                param=name,
                code="unsupported_parameter",
            )
