"""What is known of one request: who asks for what, and what has become of it so far. It decides nothing."""

import math
from typing import Any

from quire.gateway.policies import PickContext
from quire.gateway.request_facts import RequestFacts
from quire.gateway.routes import RouteKind
from quire.gateway.tenants import Tenant
from quire.gateway.usage import TokenUsage
from quire.gateway.wire import ClientRequest, Headers
from quire.gateway.worker import Worker


class ExchangeRecord:
    """Times are of the loop's clock."""

    id: str
    request: ClientRequest
    tenant: Tenant
    kind: RouteKind
    facts: RequestFacts
    targets: list[str | None]  # models to ask, the first choice first; None: any
    context: PickContext
    began: float
    last_heard: float  # from the worker
    prompt_tokens: int  # estimated
    expected_output: int
    expected_tokens: float  # weighted, as the shares count them
    tried: set[Worker]
    trace_headers: Headers  # name the span to workers

    # As they begin: one attribute for all costs nothing where a request does not need its own.
    max_wait = math.inf
    pinned: Worker | None = None  # the only worker that can answer
    stored = ""  # the stored response that it names
    worker: Worker | None = None
    model: str | None = None
    status = 0  # of the response to the client
    error = ""
    num_attempts = 0
    first_token: float | None = None
    queue_seconds = 0.0
    span: Any = None  # of OpenTelemetry
    clock_offset = 0  # nanoseconds from the loop's clock to that of spans
    usage: TokenUsage | None = None
    num_counted = 0  # what the tenant's concurrency counts for it
    reserved = 0  # of the tenant's budget
    shared: list[bool] | None = None  # for each account, whether Redis knows of it; None: limits are not shared
    is_charged = False  # its tenant's fair share was charged
    has_ended = False
