import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.core.records import RequestRecord, SchedulerStats, StepRecord
from quire.server.observe.exposition import prometheus_text
from quire.server.observe.histogram import Histogram
from quire.server.observe.metrics import Metrics
from server.running import running

ROOT = Path(__file__).parents[2]


def samples(text: str) -> dict[str, float]:
    """`name{label=value,...}` -> value"""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def of_model(found: dict[str, float], name: str) -> dict[str, float]:
    """Without the label that says so."""
    label = re.compile(rf",?model_name={name}(?=[,}}])")
    return {re.sub(r"{,?}|(?<={),", "", label.sub("", key)): value for key, value in found.items()}


def step(**stats: Any) -> StepRecord:
    return StepRecord(
        step=1,
        num_tokens=12,
        num_drawn=2,
        schedule_seconds=0.0001,
        run_seconds=0.02,
        update_seconds=0.0002,
        scheduler=SchedulerStats(**stats),
    )


def test_records_become_metrics() -> None:
    server = Metrics()
    metrics = server.of("it")
    metrics.step(step(running=2, waiting=3, num_blocks=10, held_blocks=4, held_slots=64, used_slots=48, preemptions=1))
    metrics.step(step(running=2, waiting=1, num_blocks=10, held_blocks=5, held_slots=80, used_slots=60, preemptions=2,
                      prefix_queries=100, prefix_hits=40))  # fmt: skip
    metrics.tokens([(0.03, 3)])
    metrics.request(
        RequestRecord(
            id="a",
            finish_reason="stop",
            num_prompt_tokens=10,
            num_cached_tokens=4,
            num_output_tokens=5,
            num_samples=1,
            max_tokens=None,
            arrival=1.0,
            admitted=1.05,
            first_token=1.2,
            last_token=2.0,
            finished=2.1,
        )
    )
    found = of_model(samples(prometheus_text(server).decode()), "it")
    assert found["quire_num_requests_running"] == 2 and found["quire_num_requests_waiting"] == 1
    assert found["quire_kv_cache_usage_ratio"] == 0.5 and found["quire_kv_cache_waste_ratio"] == 0.25
    assert found["quire_prompt_tokens_total"] == 10 and found["quire_generation_tokens_total"] == 4
    assert found["quire_prefix_cache_queries_total"] == 100 and found["quire_prefix_cache_hits_total"] == 40
    assert found["quire_preemptions_total"] == 2
    assert found["quire_request_success_total{finished_reason=stop}"] == 1
    assert found["quire_inter_token_latency_seconds_count"] == 3
    assert found["quire_inter_token_latency_seconds_sum"] == pytest.approx(0.03)
    assert found["quire_time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert found["quire_time_per_output_token_seconds_sum"] == pytest.approx(0.2)
    assert found["quire_e2e_request_latency_seconds_sum"] == pytest.approx(1.1)
    assert found["quire_request_queue_time_seconds_sum"] == pytest.approx(0.05)
    assert found["quire_request_prefill_time_seconds_sum"] == pytest.approx(0.15)
    assert found["quire_request_inference_time_seconds_sum"] == pytest.approx(0.95)
    assert found["quire_step_seconds_count{phase=run}"] == 2
    assert found["quire_step_tokens_bucket{le=16.0}"] == 2 and found["quire_step_tokens_bucket{le=8.0}"] == 0


def test_counters_survive_the_engine() -> None:
    server = Metrics()
    metrics = server.of("it")
    metrics.loaded()
    metrics.step(step(preemptions=5, prefix_hits=7))
    metrics.restarted(num_retried=8, num_charged=1)
    metrics.step(step(preemptions=1))
    found = of_model(samples(prometheus_text(server).decode()), "it")
    assert found["quire_preemptions_total"] == 6 and found["quire_prefix_cache_hits_total"] == 7
    assert found["quire_engine_restarts_total"] == 1
    assert found["quire_requests_retried_total"] == 8 and found["quire_requests_charged_total"] == 1
    assert found["quire_model_loaded"] == 1 and found["quire_model_loads_total"] == 1
    metrics.unloaded()
    found = of_model(samples(prometheus_text(server).decode()), "it")
    assert found["quire_model_loaded"] == 0 and found["quire_engine_restarts_total"] == 1


def test_accepted_draft_tokens_are_counted_over_all_engines_and_by_position() -> None:
    server = Metrics()
    metrics = server.of("it")
    metrics.step(step(drafts=4, draft_tokens=10, accepted_tokens=6, accepted_at=[3, 2, 1]))
    metrics.restarted()
    metrics.step(step(drafts=1, draft_tokens=2, accepted_tokens=1, accepted_at=[1]))
    found = of_model(samples(prometheus_text(server).decode()), "it")
    for name, labels in (("quire_", ""), ("vllm:", "engine=0")):
        kept = f"{{{labels}}}" if labels else ""
        assert found[f"{name}spec_decode_num_drafts_total{kept}"] == 5
        assert found[f"{name}spec_decode_num_draft_tokens_total{kept}"] == 12
        assert found[f"{name}spec_decode_num_accepted_tokens_total{kept}"] == 7
        more = f"{labels}," if labels else ""
        per_place = f"{name}spec_decode_num_accepted_tokens_per_pos_total"
        assert [found[f"{per_place}{{{more}position={place}}}"] for place in range(3)] == [4, 2, 1]


def test_dashboards_made_for_vllm_find_their_names() -> None:
    server = Metrics()
    for name in ("a", "b"):
        server.of(name).step(step(running=2, waiting=1, num_blocks=4, block_size=16, held_blocks=1, preemptions=3))
        server.of(name).tokens([(0.5, 1)])
        server.of(name).finished["cancelled"] += 1
        server.of(name).request_longest_output.observe(7)
        server.of(name).request_computed.observe(5)
    found = samples(prometheus_text(server).decode())
    for name in ("a", "b"):
        assert found[f"vllm:num_requests_running{{engine=0,model_name={name}}}"] == 2
        size = "block_size=16,engine=0"
        assert found[f"vllm:cache_config_info{{{size},model_name={name},num_gpu_blocks=4}}"] == 1
        assert found[f"vllm:request_max_num_generation_tokens_sum{{engine=0,model_name={name}}}"] == 7
        assert found[f"vllm:request_prefill_kv_computed_tokens_sum{{engine=0,model_name={name}}}"] == 5
        assert found[f"vllm:kv_cache_usage_perc{{engine=0,model_name={name}}}"] == 0.25
        assert found[f"vllm:num_preemptions_total{{engine=0,model_name={name}}}"] == 3
        assert found[f"vllm:iteration_tokens_total_sum{{engine=0,model_name={name}}}"] == 12
        assert found[f"vllm:inter_token_latency_seconds_count{{engine=0,model_name={name}}}"] == 1
        assert found[f"vllm:request_success_total{{engine=0,finished_reason=abort,model_name={name}}}"] == 1


def test_the_page_tells_of_all_metrics() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "tools" / "metrics_page.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.page() == tool.PAGE.read_text(), "docs/metrics.md is stale: run python tools/metrics_page.py"


@pytest.mark.parametrize(
    ("file", "page_name"),
    [
        ("grafana/quire.json", "metrics.md"),
        ("prometheus/alerts.yml", "metrics.md"),
        ("grafana/gateway.json", "gateway.md"),
        ("prometheus/gateway-alerts.yml", "gateway.md"),
    ],
)
def test_what_is_deployed_asks_for_metrics_that_exist(file: str, page_name: str) -> None:
    page = (ROOT / "docs" / page_name).read_text()
    kinds = dict(re.findall(r"^\| `(quire_\w+)` \| (\w+) ", page, re.MULTILINE))
    exist = {name for name, kind in kinds.items() if kind != "histogram"}
    exist |= {
        f"{name}_{part}" for name, kind in kinds.items() if kind == "histogram" for part in ("bucket", "sum", "count")
    }
    deployed = (ROOT / "deploy" / file).read_text()
    asked = set(re.findall(r"quire_[a-z0-9_]+", deployed)) - {"quire_"}
    assert len(asked) > 5 and asked <= exist, asked - exist

    labels = {
        name.strip() for row in re.findall(r"^\| `quire_\w+` \| \w+ \| ([^|]*)", page, re.M) for name in row.split(",")
    }
    expressions = list(_expressions(yaml.safe_load(deployed)))  # JSON is YAML
    assert len(expressions) > 5
    for expression in expressions:
        promql_parser.parse(expression.replace("$__rate_interval", "5m"))
        used = set(re.findall(r"[{,]\s*(\w+)\s*=~?", expression))
        used |= {name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")}
        assert used <= labels | {"le", "job", "instance"}, expression


def _expressions(deployed: Any) -> Iterator[str]:
    if isinstance(deployed, dict):
        yield from ([deployed["expr"]] if "expr" in deployed else [])
        deployed = list(deployed.values())
    for one in deployed if isinstance(deployed, list) else ():
        yield from _expressions(one)


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)] and math.isclose(histogram.sum, 8.0)


def test_http_requests_are_counted_by_route_as_declared() -> None:
    with running() as server:
        server.complete()
        server.complete(n=0)
        server.http.get("/v1/models/fake")
        server.http.get("/made/up/by/a/client")
        response = server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        found = samples(response.text)
    assert found["quire_http_requests_total{route=/v1/completions,status=200}"] == 1
    assert found["quire_http_requests_total{route=/v1/completions,status=400}"] == 1
    assert found["quire_http_requests_total{route=/v1/models/{name:path},status=200}"] == 1
    assert found["quire_http_requests_total{route=other,status=404}"] == 1
