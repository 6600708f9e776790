"""What the server writes to its log: text for people, or a JSON object a line for machines."""

import logging
import sys
import time
from typing import Any

import msgspec

from quire.server.access.request_context import RequestContext

access = logging.getLogger("quire.access")

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonLines(logging.Formatter):
    """A record's own fields stand beside the time, the level and the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if fields := getattr(record, "fields", None):
            line |= fields
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def log_visit(visit: RequestContext, status: int) -> None:
    """Times are in seconds; what is not known of a request is left out."""
    seconds = time.monotonic() - visit.began
    fields: dict[str, Any] = {
        "request_id": visit.id,
        "client": visit.client,
        "method": visit.method,
        "path": visit.path,
        "status": status,
        "seconds": round(seconds, 6),
    }
    if visit.tenant:
        fields["tenant"] = visit.tenant
    if visit.model:
        fields |= {
            "model": visit.model,
            "prompt_tokens": visit.prompt_tokens,
            "cached_tokens": visit.cached_tokens,
            "output_tokens": visit.output_tokens,
        }
    if visit.first_token is not None:
        fields["ttft"] = round(visit.first_token - visit.began, 6)
    if visit.finish_reasons:
        fields["finish_reasons"] = visit.finish_reasons
    if visit.error:
        fields["error"] = visit.error
    text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("method", "path", "status"))
    access.info("%s %s %d %s", visit.method, visit.path, status, text, extra={"fields": fields})
