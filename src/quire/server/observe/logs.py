"""The server's log: text, or a JSON object on each line."""

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
    """The fields of a record stand beside time, level and logger."""

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


def log_request(context: RequestContext, status: int) -> None:
    """Times are in seconds; unknown fields are left out."""
    seconds = time.monotonic() - context.began
    fields: dict[str, Any] = {
        "request_id": context.id,
        "client": context.client,
        "method": context.method,
        "path": context.path,
        "status": status,
        "seconds": round(seconds, 6),
    }
    if context.tenant:
        fields["tenant"] = context.tenant
    if context.model:
        fields |= {
            "model": context.model,
            "prompt_tokens": context.prompt_tokens,
            "cached_tokens": context.cached_tokens,
            "output_tokens": context.output_tokens,
        }
    if context.records and (admitted := context.records[0].admitted) is not None:
        fields["admitted"] = round(admitted - context.began, 6)
    if context.first_token is not None:
        fields["ttft"] = round(context.first_token - context.began, 6)
    if context.finish_reasons:
        fields["finish_reasons"] = context.finish_reasons
    if context.error:
        fields["error"] = context.error
    text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("method", "path", "status"))
    access.info("%s %s %d %s", context.method, context.path, status, text, extra={"fields": fields})
