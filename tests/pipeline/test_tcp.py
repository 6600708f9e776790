"""Stages that are reached over TCP: the same tokens, versions and files checked, and connections that end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire import LLM
from quire.core.errors import BadRequest, EngineFailed
from quire.engine.options import EngineOptions
from quire.executors.pipeline import greeting
from quire.executors.pipeline.greeting import FetchHidden, GreetStage, files_digest, new_greeting
from ranks.processes import check_that_streams_go_on, exists, followers, texts, wait_until

RANK = b"quire.executors.pipeline.rank_follower"
FOLLOWER = b"quire.executors.pipeline.remote_follower"


class Listener:
    """`quire stage` as a process."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "quire.cli.main", "stage", str(model), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.address = self.process.stderr.readline().split(" on ")[1].strip()

    @property
    def children(self) -> list[int]:
        return followers(self.process.pid, FOLLOWER)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)  # ignored, if the tests run behind a shell that is not interactive
        try:
            self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def listeners(deep_model: Path) -> Iterator[list[Listener]]:
    listeners = [Listener(deep_model) for _ in range(2)]
    yield listeners
    for one in listeners:
        one.stop()


def test_tokens_are_those_of_one_process_over_tcp(deep_model: Path, listeners: list[Listener]) -> None:
    expected = texts(LLM(deep_model))
    llm = LLM(deep_model, pipeline_stages=",".join(one.address for one in listeners))
    assert llm.engine.capacity.micro_batches == 3
    assert texts(llm) == expected
    children = [child for one in listeners for child in one.children]
    llm.engine.stop()
    assert len(children) == 2
    wait_until(lambda: not any(exists(child) for child in children))


def test_a_stage_elsewhere_may_have_several_ranks(deep_model: Path, listeners: list[Listener]) -> None:
    expected = texts(LLM(deep_model))
    llm = LLM(deep_model, pipeline_stages=listeners[0].address, tensor_parallel_size=2)
    assert texts(llm) == expected
    [child] = listeners[0].children
    [rank] = followers(child, RANK)
    llm.engine.stop()
    wait_until(lambda: not exists(child) and not exists(rank))


def test_a_stage_that_hangs_is_ended_by_its_listener(deep_model: Path, listeners: list[Listener]) -> None:
    llm = LLM(deep_model, pipeline_stages=listeners[0].address)
    [child] = listeners[0].children
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match=rf"stage 1 of 2 \(at {listeners[0].address}\) has ended"):
        texts(llm)
    wait_until(lambda: not exists(child))
    llm.engine.stop()


def test_streams_go_on_when_a_stage_elsewhere_is_killed(deep_model: Path, listeners: list[Listener]) -> None:
    first = listeners[0]
    check_that_streams_go_on(deep_model, lambda engine: first.children[0], pipeline_stages=first.address)


def test_other_versions_and_other_files_are_refused(
    deep_model: Path, tiny_model: Path, listeners: list[Listener]
) -> None:
    with pytest.raises(EngineFailed, match=r"other model files.*\n.*the same files"):
        LLM(tiny_model, pipeline_stages=listeners[0].address)
    hello = new_greeting(files_digest(deep_model), "s", 1, 2, "")
    with pytest.raises(EngineFailed, match=r"the stage is quire .*, and the engine is 0.0\n"):
        greeting.connect(listeners[0].address, msgspec.structs.replace(hello, quire="0.0"))
    with pytest.raises(EngineFailed, match="stage 2 of 2 is asked for"):
        greeting.connect(listeners[0].address, msgspec.structs.replace(hello, rank=2))
    with pytest.raises(EngineFailed, match="serves another engine"):
        greeting.connect(listeners[0].address, FetchHidden(greeting.VERSION, "unknown"))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\x7f", b"\x03\x00\x00\x00abc"])
def test_what_is_no_greeting_ends_the_connection(listeners: list[Listener], data: bytes) -> None:
    host, port = greeting.parse_address(listeners[0].address)
    with socket.create_connection((host, port), 5.0) as end:
        end.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(1) == b""


def test_addresses_are_checked(deep_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "CONNECT_TIMEOUT", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(EngineFailed, match=rf"no stage answers at {address}.*\n.*quire stage MODEL --listen {address}"):
        LLM(deep_model, pipeline_stages=address)
    with pytest.raises(BadRequest, match=r"`nowhere` is no address of a stage.*\n.*HOST:PORT"):
        LLM(deep_model, pipeline_stages="nowhere")
    with pytest.raises(BadRequest, match=r"pipeline_parallel_size is 2, and pipeline_stages names 2.*\n.*use 3"):
        EngineOptions(pipeline_parallel_size=2, pipeline_stages="a:1,b:2")
    assert GreetStage.__struct_fields__[:2] == ("version", "quire"), "versions come first"


def test_an_address_in_use_is_named(deep_model: Path, listeners: list[Listener]) -> None:
    command = [sys.executable, "-m", "quire.cli.main", "stage", str(deep_model), "--listen", listeners[0].address]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and f"{listeners[0].address} cannot be listened on" in ended.stderr
