"""The plan in a real browser: its sliders, its picture of the memory, its link."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from page.browser import Browser
from page.serving import Served, served

SHOWN = "!document.querySelector('.plan .results').hidden"
ANSWERED = "document.querySelector('.plan .results').ariaBusy === 'false'"
TITLE = "document.querySelector('.plan-head h2').textContent"
VERDICT = "document.querySelector('.plan .verdict').textContent"
WIDEST = "document.querySelector('#plan-view').scrollWidth"
TROUBLE = "document.querySelector('.plan .trouble')"
LLAMA = "#plan?shape=llama-3.1-8b&hardware=h100"


@pytest.fixture(scope="module")
def planner(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a machine that was never measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        with served(default_model) as server:
            yield server


@pytest.fixture
def page(chromium: Browser, planner: Served) -> Iterator[Browser]:
    """Opened with nothing chosen. In the end nothing has failed in it, and it has asked nobody but its server."""
    chromium.open(f"{planner.url}/#plan")
    chromium.wait(SHOWN)
    yield chromium
    assert chromium.complaints() == []
    assert all(url.startswith(planner.url) for url in chromium.requested())
    chromium.close()


def go(page: Browser, address: str) -> None:
    """To a plan of another model."""
    page.js(f"location.hash = {json.dumps(address)}")
    page.wait(f"{TITLE} === 'llama-3.1-8b' && {ANSWERED}")


def choose(page: Browser, name: str, value: str) -> None:
    page.js(
        f"(s => {{ s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change')) }})"
        f"(document.querySelector('.controls [name={name}]'))"
    )


def asked(page: Browser) -> list[dict[str, Any]]:
    """The bodies of the plans asked for."""
    page.js("1")
    requests = [e["params"]["request"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    return [json.loads(r["postData"]) for r in requests if r["url"].endswith("/plan")]


def width(page: Browser, part: str) -> float:
    """Of a part of the memory, in percent of the bar."""
    style = page.js(f"document.querySelector('.bars .segment.{part}').style.width")
    return float(style.removesuffix("%"))


def cell(page: Browser, part: str, column: int) -> str:
    text: str = page.js(f"document.querySelector('.memory tr.{part}').cells[{column}].textContent")
    return text


def test_the_served_model_beside_what_the_server_has(page: Browser, planner: Served) -> None:
    info = planner.engine.info
    assert page.js(TITLE) == info.name
    assert page.js("document.querySelector('#to-plan').getAttribute('aria-current')") == "page"
    assert "it fits" in page.js(VERDICT)
    planned, here = (float(cell(page, "weights", column).removesuffix(" MiB")) for column in (1, 2))
    assert here == pytest.approx(info.weight_bytes / 2**20, abs=0.06)
    assert here <= planned < 1.05 * here
    assert cell(page, "kv_cache", 1) == "360 MiB", "4 users of 4,096 tokens of 22.5 KiB"
    assert f"for {info.num_blocks * info.block_size:,} tokens" in cell(page, "kv_cache", 2)
    assert "so far" in cell(page, "total", 2)
    assert "`quire plan` measures it" in page.js(f"{TROUBLE}.textContent")
    assert page.js("document.querySelector('.plan .figure .value').textContent") == "–", "no rate is made up"
    assert page.js("document.querySelector('.controls [name=format]').disabled")


def test_the_bar_moves_with_the_sliders(page: Browser) -> None:
    go(page, f"{LLAMA}&users=8")
    weights, before = width(page, "weights"), width(page, "kv_cache")
    page.js("document.querySelector('.controls [name=context]').focus()")
    for _ in range(4):
        page.press("ArrowRight")
    page.wait("document.querySelector('.memory tr.kv_cache').textContent.includes('8 × 16,384 tokens')")
    assert page.js("document.querySelector('.controls [name=context]').getAttribute('aria-valuetext')").startswith(
        "16,384"
    )
    assert width(page, "kv_cache") == pytest.approx(4 * before) and width(page, "weights") == weights
    assert page.js("location.hash") == f"{LLAMA}&users=8&context=16384"
    choose(page, "kv_cache_dtype", "fp8")
    page.wait("document.querySelector('.memory tr.kv_cache').cells[1].textContent === '8.00 GiB'")
    assert cell(page, "weights", 1) == "15.0 GiB"


def test_the_last_stop_of_a_drag_wins(page: Browser) -> None:
    go(page, LLAMA)
    num_before = len(asked(page))
    page.js(
        "(async slider => { for (let stop = 0; stop < 18; stop++) { slider.value = stop;"
        " slider.dispatchEvent(new Event('input')); await new Promise(r => setTimeout(r, 10)) } })"
        "(document.querySelector('.controls [name=users]'))"
    )
    page.wait("document.querySelector('.memory tr.kv_cache').textContent.includes('512 × 4,096 tokens')")
    assert "are missing" in page.js(VERDICT)
    bodies = asked(page)[num_before:]
    assert bodies[-1]["users"] == 512 and len(bodies) < 10, "what lies between is skipped"
    assert page.js("document.querySelector('.bars .limit').hidden") is False
    assert "use " in page.js("document.querySelector('.advice .needed').parentElement.textContent")


def test_a_link_is_a_plan(page: Browser) -> None:
    go(page, f"{LLAMA}&format=awq&tp=2&users=100&context=10000&prompt=9000&price=2.5")
    page.reload()
    page.wait(SHOWN)
    chosen = page.js("Object.fromEntries(new FormData(document.querySelector('.controls')))")
    assert {name: chosen[name] for name in ("shape", "format", "hardware", "tp", "prompt", "price")} == {
        "shape": "llama-3.1-8b", "format": "awq", "hardware": "h100", "tp": "2", "prompt": "9000", "price": "2.5",
    }  # fmt: skip
    assert page.js("[...document.querySelectorAll('.slider output')].map(e => e.textContent)") == ["10,000", "100"]
    assert "$120.00 a day" in page.js("document.querySelector('.plan .figures').textContent")
    assert asked(page)[-1]["output"] == 256
    own = "[...document.querySelectorAll('.roofline tr.own')].map(e => e.cells[0].textContent)"
    assert page.js(own) == ["prefill 9,000", "decode 100"]
    assert page.js("document.querySelector('.attention .own').closest('tr').cells[0].textContent") == "GQA"
    assert page.js("document.querySelectorAll('.fits dl > div').length") == 7
    assert "on several GPUs" in page.js("document.querySelector('.others').textContent")
    gains = page.js(
        "[...document.querySelectorAll('.drafts tbody tr')].map(row => parseFloat(row.cells[3].textContent))"
    )
    assert gains == sorted(gains) and gains[-1] > gains[0] > 0, "the more are accepted, the more they gain"
    page.js("location.hash = '#chat'")
    page.js("location.hash = '#plan'")
    page.wait("location.hash.includes('users=100')")  # what was chosen is still there


def test_what_the_server_refuses_is_told_beside_its_field(page: Browser) -> None:
    page.js("location.hash = '#plan?shape=lama-3.1-8b&hardware=h100&users=-3&tp=x&more=1'")
    page.wait(f"{TROUBLE}.textContent.includes('near it: llama-3.1-8b')")
    assert asked(page)[-1]["users"] == 4 and asked(page)[-1]["tp"] == 1, "what cannot be is as if it was left out"
    assert page.js("document.querySelector('.controls .wrong').name") == "shape"
    assert page.js("document.querySelector('.results').classList.contains('stale')")
    choose(page, "shape", "mistral-7b")
    page.wait(f"{TROUBLE}.hidden && {TITLE} === 'mistral-7b'")
    assert page.js("document.querySelector('.controls .wrong') === null")
    page.events = [event for event in page.events if event.get("method") != "Log.entryAdded"]  # the browser logs a 400


def test_by_keyboard_on_a_phone_in_the_dark(page: Browser) -> None:
    page.resize(390, 844)
    assert page.js(WIDEST) <= 390
    page.js("location.hash = '#chat'")
    page.js("document.activeElement.blur()")
    page.press("l")
    page.wait("location.hash === '#plan'")
    go(page, f"{LLAMA}&context=131072&users=3")
    page.theme("dark")
    assert page.js(WIDEST) <= 390
    order = (
        "['.sliders', '.bars', '.figures'].map(s => document.querySelector(`.plan ${s}`).getBoundingClientRect().top)"
    )
    places = page.js(order)
    assert places == sorted(places) and places[1] < 500, "the bar is seen while a slider is moved"
    page.js("document.querySelector('.formulas summary').focus()")
    page.press("Enter")
    formulas = page.js("document.querySelector('.formulas[open]').textContent")
    assert "32 layers x 2 x 8 heads x 128 columns x 2 bytes = 131,072 bytes = 128.0 KiB" in formulas
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(23, 21, 18)"
    page.theme("light")


def test_what_is_chosen_for_the_reader_is_what_is_planned(page: Browser) -> None:
    """The selects said bfloat16 weights of gpt-oss, and a float16 cache on every GPU."""
    page.js("location.hash = '#plan?shape=gpt-oss-20b&hardware=h100'")
    page.wait(f"{TITLE} === 'gpt-oss-20b' && {ANSWERED}")
    selected = "(name => document.querySelector(`.controls [name=${name}]`).selectedOptions[0].textContent)"
    page.wait(f"{selected}('format') === 'mxfp4 (as published)'")
    assert page.js(f"{selected}('kv_cache_dtype')") == "bfloat16 (auto)"
    assert "less behind windows" in page.js("document.querySelector('.memory tr.kv_cache').textContent")
    choose(page, "format", "bfloat16")
    page.wait("document.querySelector('.memory tr.weights').cells[1].textContent === '39.1 GiB'")
    choose(page, "hardware", "graviton4")
    page.wait(f"{selected}('kv_cache_dtype') === 'float16 (auto)'")
