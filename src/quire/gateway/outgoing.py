"""What is sent to a worker: the body, with the model's own name and what the gateway adds, and the head."""

from math import isfinite
from typing import Any
from urllib.parse import quote

import msgspec

from quire.gateway.loops import via
from quire.gateway.request_facts import RequestFacts, renamed, with_fields
from quire.gateway.resuming import RESUME_HEADER, DeliveredStream
from quire.gateway.routes import OPENAI_STREAMS, SALTED, path_model
from quire.gateway.tenants import Tenant, Tenants
from quire.gateway.wire import CREDENTIALS, ClientRequest, Headers, request_head
from quire.gateway.worker import Worker


class OutgoingBody(msgspec.Struct):
    body: bytes
    target: bytes
    is_wrapped: bool = False  # with what another worker needs to go on
    drop_usage: bool = False  # the usage was asked for by the gateway: the client does not get it


def outgoing_body(
    request: ClientRequest,
    facts: RequestFacts,
    model: str | None,
    worker: Worker,
    tenant: Tenant,
    delivered: DeliveredStream | None,
) -> OutgoingBody:
    """The body as it came, unless something has to change. `delivered`: of a stream that may be resumed."""
    changes: dict[str, Any] = {}
    target, drop_usage = request.target, False
    if model is not None and facts.model is not None and model != facts.model:
        if (named := path_model(request.path)) is not None:
            target = target.replace(named.encode("latin-1"), quote(model, safe="").encode(), 1)
        else:
            changes = renamed(facts, model)
    if tenant.name and facts.stream and request.path in OPENAI_STREAMS and "stream_options" not in facts.fields:
        changes["stream_options"] = {"include_usage": True}
        drop_usage = True
    if _adds_salt(worker, tenant, request):
        changes["cache_salt"] = salt_at(worker, tenant, request, facts)
    body = with_fields(facts, changes) if changes else request.body
    is_wrapped = delivered is not None and worker.resumes
    if delivered is not None and is_wrapped:
        body = delivered.wrap(body)
    return OutgoingBody(body, target, is_wrapped, drop_usage)


def _adds_salt(worker: Worker, tenant: Tenant, request: ClientRequest) -> bool:
    return bool(tenant.salt) and worker.is_quire and request.path in SALTED


def salt_at(worker: Worker, tenant: Tenant, request: ClientRequest, facts: RequestFacts) -> str:
    """The `cache_salt` that a worker gets. What the client itself asks for stays apart within the tenant."""
    if not _adds_salt(worker, tenant, request):
        return facts.cache_salt
    return tenant.salt + (f":{facts.cache_salt}" if facts.cache_salt else "")


def outgoing_head(
    request: ClientRequest,
    outgoing: OutgoingBody,
    worker: Worker,
    request_id: str,
    peer: bytes,
    seconds_left: float,
    tenants: Tenants,
    trace_headers: Headers,
) -> bytes:
    """`seconds_left`: until the deadline of the client, infinite where it has none."""
    forwarded = request.named.get(b"x-forwarded-for")
    own = {
        b"x-request-id": request_id.encode("ascii"),
        b"accept-encoding": b"",  # the gateway reads what passes
        b"via": via(request),
        b"x-forwarded-for": forwarded + b", " + peer if forwarded else peer,
    }
    own.update(trace_headers)
    if outgoing.is_wrapped:
        own[RESUME_HEADER] = b"1"
    if worker.credentials:
        own.update(worker.credentials)
    elif not tenants.is_open:
        own.update(dict.fromkeys(CREDENTIALS, b""))
    if isfinite(seconds_left):
        own[b"x-request-timeout"] = b"%.3f" % max(seconds_left, 0.001)
    changed = request if outgoing.target is request.target else _with_target(request, outgoing.target)
    return request_head(changed, worker.pool.host, worker.pool.prefix, len(outgoing.body), own)


def _with_target(request: ClientRequest, target: bytes) -> ClientRequest:
    return ClientRequest(request.method, target, request.path, request.headers)
