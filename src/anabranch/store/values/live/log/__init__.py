"""The SSD tier of values: `ValueLog`. Decisions: `store.values.log`; what lies on disk: `store.values.log_format`."""

from anabranch.store.values.live.log.value_log import ValueLog

__all__ = ["ValueLog"]
