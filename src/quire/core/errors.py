"""Errors that a user can act on.

    QuireError
    ├── BadRequest          400  a field is wrong: names it
    │   └── PromptTooLong   400  prompt + output exceed the context
    ├── UnknownModel        404  no such model, with the nearest names
    ├── BodyTooLarge        413
    ├── QueueFull           429  with Retry-After
    ├── Unavailable         503  the engine is restarting or draining
    ├── DeadlinePassed      504  the request did not finish before its deadline
    ├── BadCheckpoint       a file is damaged: names file, tensor, offset
    ├── Unsupported         an architecture, a type or a config value that is not implemented
    ├── DoesNotFit          the model or its cache needs more memory than there is
    └── EngineFailed        500  the engine has stopped on an error

Every error says what is wrong, with the numbers in it, and what to do (`hint`). On the command line it is exit status
2; over HTTP it is `status` in the dialect's own error shape. A broken invariant is an assertion, never one of these.
"""

MAX_MESSAGE = 1000  # characters: a message may quote a name of megabytes that a client has sent


class QuireError(Exception):
    status = 500
    code = "internal_error"

    def __init__(self, message: str, hint: str = "", *, param: str | None = None) -> None:
        self.message = shortened(message, MAX_MESSAGE)
        self.hint = shortened(hint, MAX_MESSAGE)
        self.param = param and shortened(param, MAX_MESSAGE)  # the field of the request that is wrong, when one is
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def shortened(text: str, limit: int) -> str:
    """The text, without its middle if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


class BadRequest(QuireError):
    status, code = 400, "invalid_request_error"


class PromptTooLong(BadRequest):
    code = "context_length_exceeded"


class UnknownModel(QuireError):
    status, code = 404, "model_not_found"


class BodyTooLarge(QuireError):
    status, code = 413, "request_too_large"


class QueueFull(QuireError):
    status, code = 429, "queue_full"

    def __init__(self, message: str, hint: str = "", *, retry_after: int = 1) -> None:
        super().__init__(message, hint)
        self.retry_after = retry_after  # seconds


class Unavailable(QuireError):
    status, code = 503, "unavailable"


class DeadlinePassed(QuireError):
    status, code = 504, "deadline_passed"


class BadCheckpoint(QuireError):
    code = "bad_checkpoint"


class Unsupported(QuireError):
    code = "unsupported"


class DoesNotFit(QuireError):
    code = "does_not_fit"


class EngineFailed(QuireError):
    code = "engine_failed"
