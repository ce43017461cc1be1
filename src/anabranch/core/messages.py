"""Rules for everything that crosses a process boundary (see `core.wire` for framing).

A message is a tagged msgspec Struct. Evolution rules: new fields have defaults and go last; a field's type and
a tag never change; a tag is never reused; unknown fields are ignored by old peers.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of every wire message. The tag is the class name."""
