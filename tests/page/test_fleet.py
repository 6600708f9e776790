"""The gateway's page in a real browser: workers, load, queues and caches, live."""

from pathlib import Path

from gateway.gateways import answers, gateway, streams, upstreams, wait_for
from page.browser import Browser

ROW = "document.querySelector('[data-worker=\"{}\"]')"
STATE = "document.getElementById('state').textContent"


def cell(worker: str, column: int) -> str:
    return f"{ROW.format(worker)}?.cells[{column}].textContent"


def figure(place: int) -> str:
    return f"document.querySelectorAll('.figure b')[{place}].textContent"


def test_the_fleet_is_seen_live(chromium: Browser, tmp_path: Path) -> None:
    with upstreams(answers(), streams("a", "b")) as (one, two):
        config = f'[[workers]]\nname = "one"\nurl = "{one.url}"\n[[workers]]\nname = "two"\nurl = "{two.url}"\n'
        key = '[[keys]]\nname = "alice"\nkey = "k"\nmonthly_budget = 7.5\n'
        with gateway(config + key, folder=tmp_path) as running:
            chromium.open(running.admin + "/")
            chromium.wait(f"{STATE} === '2 of 2 workers take requests'")
            assert chromium.js(cell("one", 1)) == "ready" and chromium.js(cell("one", 3)) == "m"
            for _ in range(6):
                assert running.chat(headers={"authorization": "Bearer k"}).status_code == 200
            chromium.wait(f"Number({cell('one', 6)}) + Number({cell('two', 6)}) === 6")
            assert "alice" in chromium.js("document.querySelector('main').textContent")
            assert chromium.js("document.querySelector('main').textContent").count("7.50 of 7.50") == 1
            running.http.post(f"{running.admin}/workers/two/drain")
            chromium.wait(f"{cell('two', 1)} === 'draining'")
            chromium.wait(f"{STATE} === '1 of 2 workers take requests'")
            chromium.resize(400, 800)
            assert chromium.js("document.documentElement.scrollWidth") <= 400, "it fits a phone"
            assert chromium.complaints() == []
            assert all(url.startswith(running.admin) for url in chromium.requested())
            chromium.close()


def test_it_asks_for_the_admin_key(chromium: Browser, tmp_path: Path) -> None:
    with upstreams(answers()) as (one,):
        config = f'admin_key = "secret"\n[[workers]]\nname = "one"\nurl = "{one.url}"\n'
        with gateway(config, folder=tmp_path) as running:
            chromium.open(running.admin + "/")
            chromium.wait("document.querySelector('form.key')")
            chromium.click("form.key input")
            chromium.type("secret")
            chromium.press("Enter")
            chromium.wait(f"{cell('one', 1)} === 'ready'")
            chromium.close()


def test_pages_from_elsewhere_may_not_ask(tmp_path: Path) -> None:
    """Else any page in a browser on this machine could add a worker."""
    with upstreams(answers()) as (one,), gateway("", "--worker", one.url, folder=tmp_path) as running:
        for origin, status in (("http://evil.example", 403), (running.admin, 201)):
            answer = running.http.post(
                f"{running.admin}/workers", json={"url": one.url, "name": "new"}, headers={"origin": origin}
            )
            assert answer.status_code == status
        scaling = running.http.get(f"{running.admin}/scaling", params={"model": "m"}).json()
        assert scaling["workers"] == 2 and scaling["requests"] == 0
        wait_for(lambda: running.http.get(f"{running.admin}/scaling").json()["workers_ready"] == 2)
        assert running.http.get(f"{running.admin}/scaling", params={"model": "x"}).status_code == 404
        assert running.http.get(f"{running.admin}/page/../gateway.toml").status_code == 404
