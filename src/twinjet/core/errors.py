"""The exception tree.

TwinjetError
├─ ConfigError          a setting that cannot work, found at start-up
├─ CheckpointError      unreadable, truncated or unsupported model file
├─ RequestError         the client must change the request (4xx)
│  ├─ InvalidRequest
│  ├─ ContextTooLong
│  └─ ModelNotFound
├─ CapacityError        the same request may succeed later (429, 503, 504)
│  ├─ Overloaded
│  └─ DeadlineExceeded
└─ EngineError          our fault (5xx)
   ├─ StepFailed
   ├─ TransferFailed
   └─ EngineDead

A message says what was expected, what came, and what to change. "Not now" inside the scheduler
(no page, no slot) is a `None`, never an exception.
"""


class TwinjetError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(TwinjetError):
    """A setting that cannot work, found at start-up."""


class CheckpointError(TwinjetError):
    """A model file that is unreadable, truncated, corrupt or of an unsupported kind."""


class RequestError(TwinjetError):
    """The request is wrong; sending it again unchanged fails again.

    `param` names the offending request field, in the client's own spelling, where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type, out of range, unknown, or unsupported."""


class ContextTooLong(RequestError):
    """The prompt, or the prompt and `max_tokens` together, do not fit the context."""


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""


class CapacityError(TwinjetError):
    """No room now; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(CapacityError):
    """Too many requests are waiting, or the server is draining or not ready."""


class DeadlineExceeded(CapacityError):
    """The request's own deadline passed, or cannot be met."""


class EngineError(TwinjetError):
    """The engine failed the request."""


class StepFailed(EngineError):
    """A step raised; its own requests fail and health turns red."""


class TransferFailed(EngineError):
    """KV pages did not arrive whole."""


class EngineDead(EngineError):
    """No engine process is left to run the request."""
