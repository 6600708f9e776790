"""Keys of clients, workers, Redis and the admin listener are in no log, at debug level and where a file is wrong; and
the admin listener needs its key, or an address."""

import signal
from pathlib import Path

from gateway.gateways import answers, gateway, upstreams, wait_for

CONFIG = """
admin_key = "hidden-admin"
audit_log = "{folder}/audit.jsonl"
[redis]
url = "redis://user:redis@hidden@127.0.0.1:1/0"
[[keys]]
name = "k"
key = "hidden-key"
monthly_budget = 1.0
[[workers]]
name = "w"
url = "{url}"
api_key = "hidden-worker"
"""
# Each is a mistake that a message could quote.
MISTAKES = [
    ("monthly_budget = 1.0", "monthly_budget = -1.0"),
    ('key = "hidden-key"', 'key = "hidden-key'),
    ('key = "hidden-key"', 'key = ["hidden-key"]'),
    ('"redis://user:redis@hidden@', '"http://user:redis@hidden@'),
    ('url = "{url}"', 'url = "http://user:hidden@127.0.0.1:1"'),
    ('api_key = "hidden-worker"', 'api_key = "hidden-worker"\napi_key_env = "NONE"'),
    ('admin_key = "hidden-admin"', 'admin_key = 5\nadmin_kye = "hidden-admin"'),
]


def test_no_secret_is_logged(tmp_path: Path) -> None:
    with upstreams(answers("a hidden answer")) as [only]:
        config = CONFIG.format(folder=tmp_path, url=only.url)
        with gateway(config, "--log-level", "debug", folder=tmp_path) as running:
            for key in ("hidden-key", "hidden-guess"):
                running.chat(content="a hidden question", headers={"authorization": f"Bearer {key}"})
            running.chat(headers={"x-api-key": "hidden-key"}, model="hidden-model")
            running.http.get(f"{running.admin}/workers", headers={"authorization": "Bearer hidden-admin"})
            running.http.get(f"{running.url}/hidden?api_key=hidden-key")
            for number, (old, new) in enumerate(MISTAKES, 1):
                old = old.format(url=only.url)
                assert old in config
                (tmp_path / "gateway.toml").write_text(config.replace(old, new))
                running.process.send_signal(signal.SIGHUP)
                wait_for(lambda number=number: sum("stays as it was" in line for line in running.said) == number)
            metrics = running.http.get(f"{running.admin}/metrics", headers={"authorization": "Bearer hidden-admin"})
            fleet = running.http.get(f"{running.admin}/fleet", headers={"authorization": "Bearer hidden-admin"})
        audit = (tmp_path / "audit.jsonl").read_text()
    assert metrics.status_code == fleet.status_code == 200
    for said in (*running.said, metrics.text, fleet.text, *audit.splitlines()):
        assert "hidden" not in said.replace("hidden-model", "").replace("/hidden", "")


def test_a_page_whose_name_leads_here_may_not_change_workers(tmp_path: Path) -> None:
    """DNS rebinding: to the browser it is the page's own server, so the origin is the host."""
    with upstreams(answers()) as [only], gateway(f'[[workers]]\nurl = "{only.url}"\n', folder=tmp_path) as running:
        workers, port = f"{running.admin}/workers", running.admin.rpartition(":")[2]
        for host, status in ((f"evil.example:{port}", 403), (f"localhost:{port}", 200), (f"[::1]:{port}", 200)):
            for origin in ({}, {"origin": f"http://{host}"}):
                assert running.http.get(workers, headers={"host": host, **origin}).status_code == status
        added = running.http.post(
            workers, json={"url": "http://evil.example"}, headers={"host": f"evil.example:{port}"}
        )
        assert added.status_code == 403 and len(running.workers()) == 1
    config = f'admin_key = "admin-secret"\n[[workers]]\nurl = "{only.url}"\n'
    with gateway(config, folder=tmp_path) as running:
        headers = {"host": "gateway.example", "authorization": "Bearer admin-secret"}
        assert running.http.get(f"{running.admin}/workers", headers=headers).status_code == 200, "who has the key may"
