"""GET /live and the page's files, without a browser."""

import base64
import json
import os
import re
import signal
import threading
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from page.serving import Served, eventually
from quire.core.records import RequestRecord
from quire.server.observe.recent import NUM_REQUESTS, Recent, percentiles
from quire.server.options import ServerOptions
from quire.server.routes import live
from quire.server.routes import page as pagefiles
from server.running import running


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


SECRET = "a secret that nobody else may read"


def test_a_request_is_seen_from_its_arrival_to_its_end(server: Served) -> None:
    def ask() -> None:
        body = {"prompt": SECRET * 3, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        server.http.post("/v1/completions", json=body).raise_for_status()

    asking = threading.Thread(target=ask)
    seen, text = [], ""
    with server.http.stream("GET", "/live") as response:
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["content-type"].startswith("text/event-stream")
        for event in events(response):
            seen.append(event)
            text += json.dumps(event)
            if len(seen) == 1:
                asking.start()
            idle = [engine["sequences"] == [] for event in seen if (engine := event["engine"])][-1]
            if idle and any(event["finished"] for event in seen[1:]):
                break
    asking.join()
    assert SECRET[:10] not in text
    engines = [event["engine"] for event in seen if event["engine"]]
    held = [engine["stats"]["held_blocks"] for engine in engines]
    assert held[0] == 0 and max(held) > 0 and held[-1] == 0
    running = next(engine for engine in engines if engine["sequences"])
    [view] = running["sequences"]
    assert view["state"] == "running" and re.fullmatch(r"[\w-]{8}", view["request_id"])
    owners = zlib.decompress(base64.b64decode(running["owners"]))
    assert len(owners) == 2 * running["stats"]["num_blocks"]
    assert owners.count(b"\2") == view["num_blocks"] == running["stats"]["held_blocks"]
    steps = [step["step"] for engine in engines for step in engine["steps"]]
    assert steps == list(range(steps[0], steps[0] + 60)), "every step is told once"
    [finished] = [record for event in seen[1:] for record in event["finished"]]  # the first has those before
    assert finished["id"] == view["request_id"] and finished["num_output_tokens"] == 60
    before, latency = seen[0]["latency"], seen[-1]["latency"]
    assert latency["first_token"]["count"] - before["first_token"]["count"] == 1
    assert latency["next_token"]["count"] - before["next_token"]["count"] == 59
    assert 0 < latency["next_token"]["p50"] <= latency["next_token"]["p99"]
    eventually(lambda: server.num_viewers == 0)


def test_snapshots_come_a_few_times_a_second_at_most(server: Served) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, "ignore_eos": True})

    asking = threading.Thread(target=ask)
    asking.start()
    with server.http.stream("GET", "/live") as response:
        times = [
            event["engine"]["now"] for event, _ in zip(events(response), range(6), strict=False) if event["engine"]
        ]
    stop.set()
    asking.join()
    assert len(times) >= 4
    assert min(later - earlier for earlier, later in pairwise(times)) > 0.19


def test_it_goes_on_with_the_next_engine(server: Served) -> None:
    with server.http.stream("GET", "/live") as response:
        told = events(response)
        assert next(told)["engine"]
        restarts = next(told)["restarts"]
        os.kill(server.engine.engine_pid, signal.SIGKILL)
        assert any(event["restarts"] > restarts and event["engine"] for event in told)


def test_who_may_look(locked: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locked.http.get("/live").status_code == 401
    assert locked.http.get("/").status_code == 200
    assert locked.http.get("/page/js/main.js").status_code == 200
    assert locked.http.post("/").status_code == 401, "only the page is open"
    assert locked.http.get("/pages").status_code == 401
    key = {"authorization": "Bearer open sesame"}
    assert locked.http.get("/live", params={"model": "no"}, headers=key).status_code == 404
    with monkeypatch.context() as patch:
        patch.setattr(live, "MAX_VIEWERS", 0)
        assert locked.http.get("/live", headers=key).status_code == 429
    with locked.http.stream("GET", "/live", headers=key) as response:
        told = events(response)
        assert next(told)["state"] == "ready"
        with monkeypatch.context() as patch:
            patch.setattr(locked.engine, "state", "draining")
            assert len(list(told)) <= 1, "a server that shuts down does not wait for those who look"


def test_a_key_of_the_file_may_look_if_its_entry_says_so(tmp_path: Path) -> None:
    """Tenants are not shown what others do, unless somebody decides that they may."""
    file = tmp_path / "keys.json"
    entries = [{"name": "tenant", "key": "one"}, {"name": "operator", "key": "two", "live": True}]
    file.write_text(json.dumps({"keys": entries}))
    with running(ServerOptions(keys_file=str(file))) as server:
        refused = server.http.get("/live", headers={"authorization": "Bearer one"})
        assert refused.status_code == 403 and "`tenant` may not use /live" in refused.json()["error"]["message"]
        assert server.http.get("/v1/models", headers={"authorization": "Bearer one"}).status_code == 200
        other = server.http.get("/live", params={"model": "none"}, headers={"authorization": "Bearer two"})
        assert other.status_code == 404, "this one may ask"


def test_a_map_is_packed_once_for_all_who_look(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    compress = zlib.compress
    monkeypatch.setattr(live.zlib, "compress", lambda raw, level: packed.append(len(raw)) or compress(raw, level))
    with server.http.stream("GET", "/live") as first, server.http.stream("GET", "/live") as second:
        told = [events(first), events(second)]
        seen = [next(one) for one in told]
        assert all(event["engine"] for event in seen)
        before = len(packed)
        server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        maps = [next(event["engine"]["owners"] for event in one if event["engine"]) for one in told]
        assert maps[0] == maps[1]
        last = [next(event["now"] for event in one if event["engine"] is None) for one in told]
        assert last and len(packed) - before <= 2 * 3, "two maps for each of the few snapshots, and not for each viewer"


def test_files(server: Served) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    again = server.http.get("/", headers={"if-none-match": f'"x", W/{page.headers["etag"]}'})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == page.headers["etag"]
    assert server.http.head("/").status_code == 200
    for path in ("nothing.js", "../pagefiles.py", "%2e%2e/pagefiles.py", "js", ""):
        assert server.http.get(f"/page/{path}").status_code == 404, path


def test_the_page_names_no_other_place_and_has_no_inline_script() -> None:
    names = pagefiles.files()
    assert "index.html" in names and len(names) > 20
    for name, file in names.items():
        text = file.content.decode()
        addresses = [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in url]
        assert name.endswith("inline.js") or not addresses, f"{name}: {addresses}"
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text, name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", text), name
    linked = re.findall(r"(?:src|href)=\"page/([^\"]+)\"", names["index.html"].content.decode())
    assert linked and set(linked) <= names.keys()


def record(number: int) -> RequestRecord:
    return RequestRecord(
        id=str(number),
        finish_reason="stop",
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=1,
        num_samples=1,
        max_tokens=None,
        arrival=0.0,
        first_token=number / 1000,
        last_token=number / 1000,
        finished=number / 1000,
    )


def test_recent_requests_are_told_once_and_in_order() -> None:
    recent = Recent()
    assert recent.since(-32) == []
    for number in range(NUM_REQUESTS + 10):
        recent.request(record(number))
    assert [one.id for one in recent.since(recent.num_finished - 2)] == [str(NUM_REQUESTS + 8), str(NUM_REQUESTS + 9)]
    assert recent.since(recent.num_finished) == [] and len(recent.since(0)) == NUM_REQUESTS


def test_percentiles_are_values_that_occurred() -> None:
    found = percentiles(value / 100 for value in range(100, 0, -1))
    assert (found.count, found.p50, found.p90, found.p99) == (100, 0.5, 0.9, 0.99)
    one = percentiles([3.0])
    assert (one.p50, one.p99) == (3.0, 3.0)
    assert percentiles([]).p50 is None
