"""One HTTP request, from its arrival to its end: who sent it, what it asked of the engine, what that cost.

Quotas, logs and traces use it. Code that runs on behalf of the request gets it from `current_request_context()`."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from quire.core.errors import QuireError
from quire.core.records import RequestRecord
from quire.server.access.keys import Key
from quire.server.access.resumption import Resumption

MAX_IGNORED = 16  # ignored fields that a header names
MAX_RECORDS = 8  # records that a trace has


@dataclass(slots=True)
class RequestContext:
    id: str
    method: str
    path: str  # as it was sent
    client: str  # its address
    key: Key | None = None
    deadline: float | None = None  # time.monotonic()
    began: float = field(default_factory=time.monotonic)
    body_bytes: int = 0
    model: str = ""  # once it is known
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: float | None = None  # time.monotonic()
    finish_reasons: list[str] = field(default_factory=list)  # one for each prompt
    records: list[RequestRecord] = field(default_factory=list)  # of its first prompts, for traces
    aborted: bool = False  # cancelled by its id
    error: str = ""  # the code of the error it was answered with
    ignored: list[str] = field(default_factory=list)  # what of its body has no effect; its client is told
    resumption: Resumption | None = None  # of a stream that a gateway can give to another server
    is_open: bool = False  # the HTTP request is in flight
    num_sequences: int = 0  # in flight: completions of its prompts, which may outlive the HTTP request
    num_counted: int = 0  # what its key has in flight because of it

    @property
    def tenant(self) -> str:
        return self.key.name if self.key else ""

    @property
    def time_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def enter(self) -> None:
        """Raises OverQuota if its key has too many requests."""
        if self.key is not None:
            self.key.quota.enter()
            self.num_counted = 1
        self.is_open = True

    def leave(self) -> None:
        """The HTTP request is over; in the background, its sequences go on."""
        self.is_open = False
        self._count()

    def hold(self, num_sequences: int) -> None:
        """So many more run. The first is counted as the HTTP request is. Raises if its key may not have so many."""
        if self.key is not None:
            more = self.num_sequences + num_sequences - self.num_counted
            self.key.quota.check_concurrency(more, self.num_sequences + num_sequences)
        self.num_sequences += num_sequences
        self._count()

    def release(self, num_sequences: int) -> None:
        self.num_sequences -= num_sequences
        self._count()

    def _count(self) -> None:
        if self.key is not None:
            counted = max(int(self.is_open), self.num_sequences)
            self.key.quota.running += counted - self.num_counted
            self.num_counted = counted

    def add(self, record: RequestRecord) -> None:
        """A request to the engine has ended."""
        self.cached_tokens += record.num_cached_tokens
        self.finish_reasons.append(record.finish_reason)
        if len(self.records) < MAX_RECORDS:
            self.records.append(record)
        if record.first_token is not None:
            self.first_token = min(record.first_token, self.first_token or record.first_token)
        self.spend(record.num_prompt_tokens, record.num_output_tokens)

    def spend(self, prompt_tokens: int, output_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        if self.key is not None:
            self.key.quota.charge(prompt_tokens + output_tokens)


_current: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def begin_request_context(context: RequestContext) -> None:
    _current.set(context)


def current_request_context() -> RequestContext | None:
    """None outside of a request."""
    return _current.get()


def current_tenant() -> str:
    """The name of the key that the current request came with; empty where no keys are needed."""
    context = _current.get()
    return context.tenant if context is not None else ""


def note_ignored(what: str) -> None:
    """A part of the current request has no effect. A header of the response says so."""
    if (context := _current.get()) and len(context.ignored) < MAX_IGNORED:
        context.ignored.append(what)


def note_error(error: QuireError) -> None:
    """The current request is answered with it."""
    if context := _current.get():
        context.error = error.code
