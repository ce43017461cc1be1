"""The one error tree. Branches say what the caller can do, not which module raised.

    AnabranchError
    ├── InvalidInput            fix the input and call again
    │   ├── ConfigError             a setting is unknown, contradictory or impossible
    │   ├── RequestError            a client's request is wrong (carries an HTTP status)
    │   ├── ModelFileError          a model directory or file cannot be used
    │   ├── MissingExtra            an optional dependency is not installed
    │   └── AccessDenied            the caller's secret or certificate does not open this
    ├── Retryable               the same call may succeed later
    │   ├── Overloaded              a queue or a pool is full (carries retry_after_s)
    │   ├── Unavailable             a peer process is gone or not ready
    │   └── DeadlineExceeded        the deadline passed first
    ├── Replan                  the bytes cannot be used; recompute or choose another source
    │   ├── StaleLease              a generation or hand-off is no longer the one promised
    │   ├── IntegrityError          a checksum does not match
    │   ├── LayoutMismatch          two sides disagree about layout or identity
    │   └── WireError               a frame is malformed
    └── InvariantBroken         a bug: report it with its story

A miss, a refusal or "pending" is a value and never an exception.
"""

from __future__ import annotations


class AnabranchError(Exception):
    """Base of every error that Anabranch raises. `code` is stable and safe to send to a client."""

    code = "internal_error"


class InvalidInput(AnabranchError):
    code = "invalid_input"


class ConfigError(InvalidInput):
    """Names the key, the value, and the remedy."""

    code = "config_error"


class RequestError(InvalidInput):
    """A client's request cannot be served as it is.

    `status` is the HTTP status, `param` the offending field (or None), `code` OpenAI's error code.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or "invalid_request"


class ModelFileError(InvalidInput):
    code = "model_file_error"


class MissingExtra(InvalidInput):
    """An optional dependency is missing; the message names the extra to install."""

    code = "missing_extra"

    def __init__(self, extra: str, module: str) -> None:
        super().__init__(f"{module} is not installed; install it with: pip install 'anabranch[{extra}]'")
        self.extra = extra


class AccessDenied(InvalidInput):
    code = "denied"


class Retryable(AnabranchError):
    code = "retryable"


class Overloaded(Retryable):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(Retryable):
    code = "unavailable"


class DeadlineExceeded(Retryable):
    code = "deadline_exceeded"


class Replan(AnabranchError):
    code = "replan"


class StaleLease(Replan):
    code = "stale_lease"


class IntegrityError(Replan):
    code = "integrity_error"


class LayoutMismatch(Replan):
    code = "layout_mismatch"


class WireError(Replan):
    code = "wire_error"


class InvariantBroken(AnabranchError):
    code = "invariant_broken"
