"""The page in a real browser, before the real server and the default model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from page.browser import Browser
from page.serving import Served, eventually, served_many

LAST = "[...document.querySelectorAll('.message.model')].at(-1)"
WRITING = "document.querySelector('.message.writing')"
WORDS = f"{LAST}.querySelector('.prose').textContent"


@pytest.fixture
def page(chromium: Browser, server: Served) -> Iterator[Browser]:
    """Just opened. In the end nothing has failed in it, and it has asked nobody but its server."""
    chromium.open(f"{server.url}/")
    chromium.wait("document.querySelector('#model').value")
    yield chromium
    assert chromium.complaints() == []
    assert all(url.startswith((server.url, "blob:")) for url in chromium.requested())
    chromium.close()


def set_parameter(page: Browser, name: str, value: object) -> None:
    page.js(
        f"(input => {{ input.value = {json.dumps(value)}; input.dispatchEvent(new Event('input')) }})"
        f"(document.querySelector('.settings [name={name}]'))"
    )


def ask(page: Browser, text: str, max_tokens: int = 24) -> None:
    set_parameter(page, "max_tokens", max_tokens)
    set_parameter(page, "temperature", 0)
    page.click(".composer textarea")
    page.type(text)
    page.press("Enter")


def answered(page: Browser) -> str:
    page.wait(f"{LAST} && !{WRITING}")
    text: str = page.js(WORDS)
    return text


def sent(page: Browser) -> list[dict[str, object]]:
    """The bodies of the chats asked for."""
    page.js("1")
    requests = [e["params"]["request"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    return [json.loads(r["postData"]) for r in requests if r["url"].endswith("/v1/chat/completions")]


def test_a_conversation(page: Browser, server: Served) -> None:
    ask(page, "Name a colour.")
    first = answered(page)
    assert first.strip()
    assert "tokens" in page.js(f"{LAST}.querySelector('footer').textContent")
    ask(page, "And another one?")
    answered(page)
    assert page.js("document.querySelectorAll('.message').length") == 4
    second = sent(page)[1]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]  # type: ignore[index]
    assert second["temperature"] == 0 and second["max_tokens"] == 24 and "top_p" not in second
    assert page.js("document.querySelector('.shelf li.current a').textContent") == "Name a colour."

    page.reload()
    page.wait("document.querySelectorAll('.message').length === 4")
    assert page.js("document.querySelector('.message.model .prose').textContent") == first
    assert page.js("document.querySelector('.settings [name=max_tokens]').value") == "24"


def test_stop_edit_and_answer_again(page: Browser, server: Served) -> None:
    ask(page, "Write a long story about a paper mill.", 2000)
    page.wait(f"{WORDS}.length > 20")
    assert page.js("document.querySelector('.composer .primary').getAttribute('aria-label')") == "Stop"
    page.press("Escape")
    answered(page)
    assert "stopped" in page.js(f"{LAST}.querySelector('footer').textContent")
    page.wait("fetch('metrics').then(r => r.text()).then(t => /quire_num_requests_running 0/.test(t))")

    page.click(".message.user [aria-label^='Edit']")
    page.js("document.querySelector('.message form textarea').select()")
    page.type("Say hello.")
    set_parameter(page, "max_tokens", 8)
    page.press("Enter")
    text = answered(page)
    assert page.js("[...document.querySelectorAll('.said')].map(e => e.textContent)") == ["Say hello."]
    page.js("document.activeElement.blur()")
    page.press("r")
    page.wait(f"{WRITING} || {WORDS}.length > 0")
    assert answered(page) == text, "the same request gives the same tokens"
    assert len(sent(page)) == 3

    said = "[...document.querySelectorAll('.said')].map(e => e.textContent)"
    assert page.js("[...document.querySelectorAll('.versions span')].map(e => e.textContent)") == ["2/2", "2/2"]
    page.click(".message.user [aria-label='Version before']")
    assert page.js(said) == ["Write a long story about a paper mill."] and len(page.js(WORDS)) > 20
    page.reload()
    page.wait("document.querySelector('.versions span').textContent === '1/2'")
    page.click(".message.user [aria-label='Version after']")
    assert page.js(said) == ["Say hello."] and page.js(WORDS) == text


def test_an_answer_that_was_cut_off_goes_on(page: Browser) -> None:
    ask(page, "Count to ten.", 40)
    whole = answered(page)
    page.click(".shelf .new")
    ask(page, "Count to ten.", 8)
    begun = answered(page)
    assert whole.startswith(begun) and whole != begun
    set_parameter(page, "max_tokens", 32)
    page.click(".go-on")
    page.wait(f"{WORDS}.length > {len(begun)}")
    assert answered(page) == whole, "it is as if it had never been cut off"
    assert page.js("document.querySelectorAll('.message').length") == 2


def test_several_conversations(page: Browser) -> None:
    ask(page, "One.", 4)
    answered(page)
    page.click(".shelf .new")
    ask(page, "Two.", 4)
    answered(page)
    titles = "[...document.querySelectorAll('.shelf li a')].map(a => a.textContent)"
    assert page.js(titles) == ["Two.", "One."]
    page.click(".shelf li:last-child a")
    page.wait("document.querySelector('.said').textContent === 'One.'")
    page.click(".shelf li.current [aria-label^='Rename']")
    page.type("First of all")
    page.press("Enter")
    assert sorted(page.js(titles)) == ["First of all", "Two."]
    page.click(".shelf li.current [aria-label^='Delete']")
    page.click("dialog .primary")
    page.wait("!document.querySelector('dialog')")
    assert page.js(titles) == ["Two."] and page.js("document.querySelector('.welcome') !== null")
    assert page.js("document.querySelector('.shelf [type=search]').hidden")
    many = [{"id": f"m{number}", "title": f"Number {number}", "updated": number} for number in range(12)]
    page.js(f"localStorage.setItem('quire.chats', {json.dumps(json.dumps(many))})")
    page.js("dispatchEvent(new Event('storage'))")  # as if another tab had
    page.click(".shelf [type=search]")
    page.type("number 1")
    assert page.js("[...document.querySelectorAll('.shelf li:not([hidden]) a')].map(a => a.textContent)") == [
        "Number 1",
        "Number 10",
        "Number 11",
    ]


def test_an_answer_goes_on_while_another_is_read(page: Browser) -> None:
    ask(page, "Tell a story.", 60)
    page.wait(WRITING)
    page.click(".shelf .new")
    assert page.js("document.querySelector('.shelf li.writing') !== null")
    page.wait("!document.querySelector('.shelf li.writing')")
    page.click(".shelf li a")
    assert len(answered(page)) > 40


def test_text_of_a_model_is_never_html(page: Browser) -> None:
    hostile = (
        "<img src=x onerror=alert(1)> <b>x</b> [y](javascript:alert(1))\n\n```html\n<script>alert(1)</script>\n```"
    )
    chat = {"id": "h", "title": "h", "system": "", "params": {}, "messages": [{"role": "user", "content": "<i>q</i>"}]}
    chat["messages"].append({"role": "assistant", "content": hostile, "reasoning": "<u>r</u>"})  # type: ignore[attr-defined]
    page.js(f"localStorage.setItem('quire.chat.h', {json.dumps(json.dumps(chat))}); location.hash = '#chat/h'")
    page.wait(LAST)
    assert page.js("document.querySelectorAll('.leaf :is(img, b, i, u, script)').length") == 0
    assert page.js("document.querySelectorAll('.leaf a').length") == 0
    assert page.js("document.querySelector('.leaf pre code').textContent") == "<script>alert(1)</script>"
    assert page.js("document.querySelector('.leaf .reasoning').open") is False
    page.click(".leaf .copy")
    page.wait("document.querySelector('.leaf .copy').textContent === 'Copied'")


def test_the_engine_at_work(page: Browser, server: Served) -> None:
    ask(page, "Write a long tale about paper and ink.", 120)
    page.wait(WRITING)
    page.js("document.activeElement.blur()")
    page.press("e")
    page.wait("/[1-9]\\d* held/.test(document.querySelector('.blocks .note')?.textContent)")
    assert server.num_viewers == 1
    page.wait("document.querySelector('.requests tbody tr')")
    assert page.js("document.querySelector('.requests .mine') !== null"), "the page knows its own requests"
    page.click(".requests .who button")
    page.wait("/prompt|prefill|drawn|looked/.test(document.querySelector('.detail td')?.textContent)")
    page.wait("/^done/.test(document.querySelector('.requests .doing:not(.label)').textContent)")
    page.wait("/ 0 held/.test(document.querySelector('.blocks .note')?.textContent)")
    figures = page.js("[...document.querySelectorAll('.figure .value')].map(e => e.textContent)")
    assert "–" not in figures[:3], "tokens a second, first token, between tokens"
    drawn = "(c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size)"
    assert page.js(f"{drawn}(document.querySelector('.blocks canvas'))") > 4, "cached blocks, free ones and gaps"
    page.js("document.querySelector('.blocks canvas').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.js("document.querySelector('.blocks .pointed').textContent").startswith("block 1: ")
    page.js("document.querySelector('.steps canvas').focus()")
    pointed = "document.querySelector('.steps .pointed').textContent"
    page.press("ArrowLeft")
    last = page.js(pointed)
    page.press("ArrowLeft")
    before = page.js(pointed)
    assert (
        last.startswith("step ") and last.endswith(": 1 next token") and before.startswith("step ") and before != last
    )
    page.press("c")
    page.wait("!document.querySelector('#chat-view').hidden")
    eventually(lambda: server.num_viewers == 0)  # nobody looks any more, so the engine is not watched


def test_keyboard(page: Browser) -> None:
    page.js("location.hash = '#engine'")
    page.reload()  # nothing has the focus here
    page.press("Tab")
    assert page.js("document.activeElement.className") == "skip"
    page.press("c")
    page.press("?")
    page.wait("document.querySelector('dialog[open] .shortcuts')")
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    page.press("t")
    assert page.js("document.documentElement.dataset.theme") == "dark"
    page.press("p")
    assert page.js("document.activeElement.closest('.settings') !== null")
    page.type("np")
    assert page.js("document.querySelector('.settings textarea').value") == "np", (
        "letters are letters where people write"
    )
    page.press("Escape")
    assert page.js("document.querySelector('.settings').hidden")
    assert page.js("document.activeElement.getAttribute('aria-label')") == "Parameters"
    page.press("?")
    page.click("dialog [type=checkbox]")
    page.press("Escape")
    page.press("t")
    assert page.js("document.documentElement.dataset.theme") == "dark", "single letters are not for everybody"


def test_the_arrow_up_edits_what_was_said_last(page: Browser) -> None:
    page.press("ArrowUp")
    assert page.js("document.activeElement.closest('.composer') !== null"), "there is nothing yet"
    ask(page, "Name a colour.", 2)
    answered(page)
    page.press("ArrowUp")
    assert page.js("document.activeElement.value") == "Name a colour."
    page.press("Escape")
    assert page.js("document.activeElement.closest('.composer') !== null")
    page.press("ArrowUp")
    page.type(" And a number.")
    page.press("Enter")
    answered(page)
    assert page.js("[...document.querySelectorAll('.said')].map(e => e.textContent)") == [
        "Name a colour. And a number."
    ]


def test_everything_has_a_name(page: Browser) -> None:
    ask(page, "Hi", 2)
    answered(page)
    nameless = """[...document.querySelectorAll('button, a, input, select, textarea, canvas')].filter(e =>
      !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')?.textContent.trim()
        || e.getAttribute('aria-hidden'))).map(e => e.outerHTML)"""
    for view in ("#chat", "#engine"):
        page.js(f"location.hash = '{view}'")
        page.wait("document.querySelector('.requests tbody tr') || location.hash.startsWith('#chat')")
        assert page.js(nameless) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(page: Browser, theme: str) -> None:
    page.theme(theme)
    contrast = """((text, ground) => {
      const probe = document.body.appendChild(document.createElement('i'));
      const pixel = document.createElement('canvas').getContext('2d');
      const light = colour => {
        probe.style.color = colour.startsWith('--') ? `var(${colour})` : colour;
        pixel.fillStyle = getComputedStyle(probe).color;
        pixel.fillRect(0, 0, 1, 1);
        const parts = [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
        const [r, g, b] = parts.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const [a, b] = [light(text), light(ground)].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    })"""
    for text in ("ink", "ink-soft", "accent", "warn", "code-string", "code-number"):
        for ground in ("paper", "sheet", "sunk"):
            assert page.js(f"{contrast}('--{text}', '--{ground}')") >= 4.5, (text, ground)
    assert page.js(f"{contrast}('--on-accent', '--accent')") >= 4.5
    assert page.js(f"{contrast}('--ink', '--accent-wash')") >= 4.5
    owners = page.js(
        "import('/page/js/engine/palette.js').then(m => Array.from({length: 20}, (_, i) => m.ownerColour(i)))"
    )
    for owner in owners:
        assert page.js(f"{contrast}('{owner}', '--paper')") >= 3, "blocks and bars can be told from the paper"


def test_a_phone(page: Browser) -> None:
    page.resize(360, 740)
    page.wait("document.querySelector('.shelf').getBoundingClientRect().right <= 0")
    ask(page, "Hi", 4)
    answered(page)
    for view in ("#chat", "#engine"):
        page.js(f"location.hash = '{view}'")
        page.wait("document.querySelector('.requests tbody tr') || location.hash.startsWith('#chat')")
        assert page.js("document.documentElement.scrollWidth") <= 360
        assert page.js("document.documentElement.scrollHeight") <= 740, "the views scroll, the page does not"
        wide = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 361).length"
        assert page.js(wide) == 0
    page.js("location.hash = '#chat'")
    page.wait("!document.querySelector('#open-shelf').hidden")
    page.click("#open-shelf")
    page.wait("document.querySelector('.shelf').getBoundingClientRect().left >= 0")
    page.click(".shelf .new")
    page.wait("document.querySelector('.shelf').getBoundingClientRect().right <= 0")


def test_a_server_that_asks_for_a_key(chromium: Browser, locked: Served) -> None:
    key = "dialog[open] input[type=password]"
    stored = "[localStorage.getItem('quire.key'), sessionStorage.getItem('quire.key')]"
    chromium.open(f"{locked.url}/")
    chromium.wait(f"document.querySelector('{key}')")
    chromium.press("Escape")
    chromium.wait("document.querySelector('#notice').textContent.includes('no API key was given')")
    chromium.click("#notice button")
    chromium.wait(f"document.querySelector('{key}')")
    chromium.type("wrong")
    chromium.press("Enter")
    chromium.wait("document.querySelector('dialog[open] p')?.textContent.includes('no valid API key')")
    assert chromium.js("document.querySelectorAll('dialog').length") == 1
    chromium.js(f"document.querySelector('{key}').select()")
    chromium.type("open sesame")
    chromium.press("Enter")
    chromium.wait("document.querySelector('#model').value && !document.querySelector('dialog')")
    assert chromium.js("document.querySelector('#notice').hidden")
    assert chromium.js(stored) == [None, "open sesame"], "until the tab is closed, unless somebody wants it kept"
    ask(chromium, "Hi", 2)
    answered(chromium)
    chromium.js("[...document.querySelectorAll('.settings .actions button')].at(-1).click()")
    chromium.js("document.querySelector('dialog [name=keep]').click()")
    chromium.press("Enter")
    chromium.wait("!document.querySelector('dialog')")
    assert chromium.js(stored) == ["open sesame", None]
    chromium.js("[...document.querySelectorAll('.settings .actions button')].at(-1).click()")
    chromium.click("dialog .dialog-buttons button:first-child")
    chromium.wait("!document.querySelector('dialog')")
    assert chromium.js(stored) == [None, None]
    chromium.close()


def offline(page: Browser, is_offline: bool) -> None:
    rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=is_offline, **rates)


def test_a_server_that_goes_away_and_comes_back(page: Browser) -> None:
    offline(page, True)
    ask(page, "Hi", 4)
    page.wait("document.querySelector('.message .problem')")
    assert "The server does not answer." in page.js("document.querySelector('.message .problem').textContent")
    page.js("location.hash = '#engine'")
    page.wait("document.querySelector('.engine-head .state').textContent === 'The server does not answer.'")
    page.js("document.dispatchEvent(new Event('visibilitychange'))")  # somebody comes back to the tab
    page.wait("!document.querySelector('#notice').hidden")
    offline(page, False)
    page.wait("document.querySelector('.engine-head .state').textContent === 'ready'")
    page.wait("document.querySelector('#notice').hidden")
    page.js("location.hash = '#chat'")
    page.click(".message .problem button")
    assert answered(page) and page.js("document.querySelector('.message .problem') === null")
    page.events = [event for event in page.events if event.get("method") != "Log.entryAdded"]  # of failed requests


def test_several_models(chromium: Browser, default_model: Path) -> None:
    with served_many(default_model, ["one", "two"], max_loaded=1) as server:
        chromium.open(f"{server.url}/#engine")
        chromium.wait("document.querySelector('.engine-head .state').textContent === 'ready'")
        assert chromium.js("[...document.querySelector('#model').options].map(o => o.textContent)") == [
            "one",
            "two (loads when asked)",
        ]
        chosen = "(s => { s.value = 'two'; s.dispatchEvent(new Event('change')) })(document.querySelector('#model'))"
        chromium.js(chosen)
        chromium.wait("document.querySelector('.engine-head .state').textContent.includes('not loaded')")
        assert chromium.js("document.querySelector('.engine .panel') === null"), "nothing of the other is left"
        chromium.js("location.hash = '#chat'")
        with server.http.stream("GET", "/live", params={"model": "one"}) as first:
            seen = first.iter_text()
            assert '"model":"one"' in next(seen)
            ask(chromium, "Hi", 2)
            answered(chromium)
            for _ in seen:  # the view of one that made room ends
                pass
        assert sent(chromium)[0]["model"] == "two"
        chromium.js("location.hash = '#engine'")
        chromium.wait("document.querySelector('.requests .mine')")
        assert chromium.js("document.querySelector('.engine-head h2').textContent") == "two"
        chromium.close()


def test_a_failure_is_told(page: Browser) -> None:
    ask(page, "Hello " * 9000, 4)
    page.wait("document.querySelector('.message .problem')")
    assert "context" in page.js("document.querySelector('.message .problem').textContent")
    page.events = [event for event in page.events if event.get("method") != "Log.entryAdded"]  # the browser logs a 400
