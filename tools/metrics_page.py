"""Writes docs/metrics.md from the metrics themselves; a test fails where the page is not what this says.

python tools/metrics_page.py"""

from pathlib import Path

from prometheus_client.metrics_core import Metric

from quire.core.records import RequestRecord, SchedulerStats, StepRecord, TierStats, TransferStats
from quire.server.observe.exposition import families
from quire.server.observe.metrics import Metrics

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """\
# Metrics

`GET /metrics`, for Prometheus. No key is needed. [deploy/](../deploy) has a configuration to scrape it, alerts, and a
dashboard for Grafana.

Every number of a model also has the name that vLLM gives it (with the label `engine="0"`), so dashboards made for vLLM
work as they are. The label `model_name` is the name that clients use. Counters go on when an engine dies or is
unloaded; gauges are 0 while it is not there. Histograms have `_bucket`, `_sum` and `_count`; times are in seconds.

A client that left is counted as status 499, which is never sent. The route `none` is that of connections that were
refused before they had sent a whole request; `other` is a path that does not exist. Error codes are listed in
[http.md](http.md#errors).

This page is made by `python tools/metrics_page.py`.

| name | kind | labels | what it is | vLLM's name |
|---|---|---|---|---|
"""


def page() -> str:
    rows: list[tuple[Metric, list[str]]] = []
    for family in families(_some_of_everything()):
        if family.name.startswith("quire_"):
            rows.append((family, []))
        else:
            rows[-1][1].append(f"`{_full_name(family)}`")
    return HEAD + "".join(_row(family, aliases) for family, aliases in rows)


def _row(family: Metric, aliases: list[str]) -> str:
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    cells = [f"`{_full_name(family)}`", family.type, ", ".join(labels), family.documentation, ", ".join(aliases)]
    return f"| {' | '.join(cells)} |\n"


def _full_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _some_of_everything() -> Metrics:
    metrics = Metrics()
    model = metrics.of("model")
    times = {"schedule_seconds": 0.0, "run_seconds": 0.0, "update_seconds": 0.0}
    scheduler = SchedulerStats(accepted_at=[1], num_blocks=1, tiers={"disk": TierStats()}, transfers=TransferStats())
    model.step(StepRecord(step=0, num_tokens=1, num_drawn=1, **times, scheduler=scheduler))
    counts = {"num_prompt_tokens": 1, "num_cached_tokens": 0, "num_output_tokens": 1, "num_samples": 1, "max_tokens": 1}
    moments = {"arrival": 0.0, "admitted": 0.0, "first_token": 0.0, "last_token": 0.0, "finished": 0.0}
    model.request(RequestRecord(id="", finish_reason="stop", **counts, **moments))
    metrics.http("/", 400, "code")
    metrics.tenant("name", 1, 1)
    return metrics


if __name__ == "__main__":
    PAGE.write_text(page())
