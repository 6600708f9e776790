"""Prefixes on disk: engines that end, start again and stand beside each other give the tokens of a cold one."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core import kv_tiers
from quire.core.errors import BadRequest
from quire.core.request import Request
from quire.engine.options import EngineOptions
from quire.runtime import disk_tier
from quire.runtime.disk_tier import DiskTier

PROMPTS = [
    "A quire is four sheets of paper or parchment folded to form eight leaves, as in medieval manuscripts. " * 2,
    "A quire is four sheets of paper or parchment folded to form eight leaves. " + "Then the binder sews them. " * 4,
    "The word is also used for twenty-five sheets of the same size and quality, one twentieth of a ream of paper.",
]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=20, logprobs=1, ignore_eos=True)
BLOCK_BYTES = 2 * 2 * 3 * 16 * 2 * 16  # of the tiny model: K and V, layers, heads, columns, bytes, tokens


@pytest.fixture(autouse=True)
def always_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model computes about as fast as a busy disk reads: what is fetched would depend on the machine."""
    monkeypatch.setattr(DiskTier, "read_seconds", lambda self, num_blocks: 0.0)
    monkeypatch.setattr(kv_tiers, "MIN_FETCH_SECONDS", 60.0)
    monkeypatch.setattr(disk_tier, "FIND_SECONDS", 60.0)
    monkeypatch.setattr(kv_tiers, "FIRST_FETCH_SECONDS", 60.0)


class Engine:
    """An `LLM` that is stopped at the end."""

    def __init__(self, model: Path, **options: object) -> None:
        self.llm = LLM(model, max_num_seqs=4, **options)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.llm.engine.stop()

    def bits(self, prompts: list[str]) -> list[list[tuple[int, float]]]:
        """Tokens and logprobs of each prompt."""
        outputs = [result.outputs[0] for result in self.llm.generate(prompts, PARAMS)]
        return [[(t, row[t].logprob) for t, row in zip(o.token_ids, o.logprobs or [], strict=True)] for o in outputs]

    @property
    def hits(self) -> int:
        return self.llm.engine.stats().tiers["disk"].hits

    def tokens(self, request: Request, count: int) -> list[int]:
        """The first of its answer, at least so many."""
        tokens: list[int] = []
        self.llm.engine.submit(request)
        while len(tokens) < count:
            tokens += [token for event in self.llm.engine.step() for token in event.tokens]
        return tokens

    def take_transfers(self) -> None:
        store = self.llm.engine.executor.store
        assert store is not None
        self.llm.engine._scheduler.take_transfers(store.take_done(), time.monotonic())

    def wait_until_saved(self) -> None:
        """All is written."""
        self.llm.engine.save_blocks()
        store = self.llm.engine.executor.store
        assert store is not None
        store._writes.put(None)
        store._threads[1].join(60)


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> dict[str, list[list[tuple[int, float]]]]:
    answers = {}
    for dtype in ("auto", "int8", "bfloat16"):
        with Engine(tiny_model, enable_prefix_caching=False, kv_cache_dtype=dtype) as engine:
            answers[dtype] = [engine.bits([prompt])[0] for prompt in PROMPTS]
    return answers


@pytest.mark.parametrize("dtype", ["auto", "int8", "bfloat16"])
def test_a_restarted_engine_finds_its_prefixes_and_gives_the_same_bits(
    tiny_model: Path, tmp_path: Path, cold: dict, dtype: str
) -> None:
    options = {"kv_disk_path": str(tmp_path), "kv_cache_dtype": dtype}
    with Engine(tiny_model, **options) as first:
        assert first.bits(PROMPTS) == cold[dtype] and first.hits == 0
    with Engine(tiny_model, **options) as second:
        assert [second.bits([prompt])[0] for prompt in PROMPTS] == cold[dtype]
        assert second.hits > 300
        assert second.bits(PROMPTS) == cold[dtype]  # from the pool now


RESTARTED = """
import json, sys
from quire import LLM, SamplingParams
from quire.core import kv_tiers
kv_tiers.FIRST_FETCH_SECONDS = 60.0
llm = LLM(sys.argv[1], max_num_seqs=4, kv_disk_path=sys.argv[2])
params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
tokens = llm.generate([sys.argv[3]], params)[0].outputs[0].token_ids
print(json.dumps([tokens, llm.engine.stats().tiers["disk"].hits]))
"""


def test_another_process_finds_them(tiny_model: Path, tmp_path: Path, cold: dict) -> None:
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        engine.bits(PROMPTS[:1])
    command = [sys.executable, "-c", RESTARTED, str(tiny_model), str(tmp_path), PROMPTS[0]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    tokens, hits = json.loads(output)
    assert tokens == [token for token, _ in cold["auto"][0]] and hits > 100
    command[-1] = PROMPTS[2]  # saved when that process ends
    num_files = len(list(tmp_path.rglob("*.kv")))
    subprocess.run(command, env=environment, capture_output=True, check=True)
    assert len(list(tmp_path.rglob("*.kv"))) >= num_files + 6


def test_a_working_set_beyond_the_pool_comes_from_the_disk(tiny_model: Path, tmp_path: Path, cold: dict) -> None:
    options = {"kv_disk_path": str(tmp_path), "kv_cache_memory_bytes": 20 * BLOCK_BYTES, "max_model_len": 256}
    with Engine(tiny_model, **options) as engine:
        for _ in range(3):
            assert [engine.bits([prompt])[0] for prompt in PROMPTS] == cold["auto"]
            engine.llm.engine.save_blocks()
        assert engine.hits > 300
        assert engine.bits(PROMPTS * 4) == cold["auto"] * 4


def test_engines_side_by_side_share_a_directory(tiny_model: Path, tmp_path: Path, cold: dict) -> None:
    options = {"kv_disk_path": str(tmp_path)}
    with Engine(tiny_model, **options) as first, Engine(tiny_model, **options) as second:
        assert first.bits(PROMPTS[:1]) == cold["auto"][:1]
        first.wait_until_saved()
        assert second.bits(PROMPTS[:1]) == cold["auto"][:1] and second.hits > 100


def wait_for_files(folder: Path, count: int) -> None:
    end = time.monotonic() + 60
    while len(list(folder.rglob("*.kv"))) < count:
        assert time.monotonic() < end, f"{count} blocks were never written"
        time.sleep(0.005)


@pytest.mark.parametrize(("policy", "num_blocks"), [("write_back", 0), ("write_through", 6)])
def test_another_engine_goes_on_from_what_one_was_answering(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, num_blocks: int
) -> None:
    monkeypatch.setattr(kv_tiers, "FIRST_SAVING_SECONDS", 0.0)
    monkeypatch.setattr(kv_tiers, "SAVING_SHARE", 0.0)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)
    request = Request(id="a", prompt_ids=[5 + i % 50 for i in range(50)], params=params)
    options = {"kv_disk_path": str(tmp_path), "kv_disk_write_policy": policy}
    with Engine(tiny_model) as alone, Engine(tiny_model, **options) as first, Engine(tiny_model, **options) as second:
        undisturbed = alone.tokens(request, 60)
        delivered = first.tokens(request, 50)  # 99 tokens are computed: six blocks, and three tokens
        wait_for_files(tmp_path, num_blocks)
        resumed = replace(request, resumed=[delivered])
        assert delivered + second.tokens(resumed, 60 - len(delivered)) == undisturbed
        assert second.hits == 16 * num_blocks
        first.llm.engine.cancel("a")


def test_blocks_that_came_while_a_step_ran_are_not_too_late(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(id="a", prompt_ids=[5 + i % 50 for i in range(50)], params=PARAMS)
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        cold = engine.tokens(request, 20)
    monkeypatch.setattr(kv_tiers, "FIRST_FETCH_SECONDS", 0.0)  # a long step takes longer than the wait may
    monkeypatch.setattr("quire.engine.engine.MAX_READ_SECONDS", 0.0)
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        engine.llm.engine.submit(request)
        events = engine.llm.engine.step()
        assert engine.llm.engine.executor.store is not None and not events
        engine.llm.engine.executor.store.wait(60)
        while not (events and events[-1].final):
            events += engine.llm.engine.step()
        assert [token for event in events for token in event.tokens] == cold and engine.hits == 48


def test_blocks_that_are_read_within_a_moment_are_in_the_same_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(id="a", prompt_ids=[5 + i % 50 for i in range(50)], params=PARAMS)
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        cold = engine.tokens(request, 20)
    monkeypatch.setattr("quire.engine.engine.MAX_READ_SECONDS", 30.0)
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        engine.llm.engine._step_seconds = 60.0
        engine.llm.engine.submit(request)
        (event,) = engine.llm.engine.step()
        assert event.tokens == cold[:1] and engine.hits == 48
        engine.llm.engine.cancel("a")


def test_another_cache_type_or_block_size_finds_nothing(tiny_model: Path, tmp_path: Path) -> None:
    for more in ({}, {"kv_cache_dtype": "int8"}, {"block_size": 32}, {"max_model_len": 300}):
        with Engine(tiny_model, kv_disk_path=str(tmp_path), **more) as engine:
            engine.bits(PROMPTS)
            assert engine.hits == 0
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 4


def test_damaged_blocks_are_computed_again(tiny_model: Path, tmp_path: Path, cold: dict) -> None:
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        engine.bits(PROMPTS)
    for number, file in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(file.read_bytes())
        content[600 + number] ^= 4
        file.write_bytes(content if number % 2 else content[:-7])
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        assert [engine.bits([prompt])[0] for prompt in PROMPTS] == cold["auto"]
        assert engine.hits == 0 and engine.llm.engine.stats().tiers["disk"].errors >= 2
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        assert engine.bits(PROMPTS[:1]) == cold["auto"][:1] and engine.hits > 100, "it was not written again"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_changes_no_answer(
    tiny_model: Path, tmp_path: Path, cold: dict, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*args: object) -> int:
        raise OSError(number, "no")

    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        monkeypatch.setattr(os, "writev", fails)
        assert engine.bits(PROMPTS * 2) == cold["auto"] * 2
        host = engine.llm.engine._scheduler.kv_blocks.host
        engine.wait_until_saved()
        engine.take_transfers()
        assert host.num_held == 0, "host blocks are stranded"


def test_a_reset_forgets_the_disk_as_well(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, kv_disk_path=str(tmp_path)) as engine:
        engine.bits(PROMPTS)
        assert engine.llm.reset_prefix_cache()
        engine.wait_until_saved()
        assert not list(tmp_path.rglob("*.kv"))
        engine.bits(PROMPTS[:1])
        assert engine.hits == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_disk_size": 200}, "kv_disk_size is 200 GiB, and kv_disk_path is not given"),
        ({"kv_disk_write_policy": "write_through"}, "kv_disk_write_policy is write_through, and kv_disk_path is not"),
        ({"kv_disk_path": "kv", "enable_prefix_caching": False}, "kv_disk_path keeps the prefix cache, and enable_pre"),
        ({"kv_offloading_size": 4, "enable_prefix_caching": False}, "kv_offloading_size keeps the prefix cache"),
    ],
)
def test_options_of_a_tier_that_is_not_there_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        EngineOptions(**options)


def test_a_model_whose_prefixes_stay_in_the_pool_says_so(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "mistral")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (model / "config.json").write_text(json.dumps(config))
    LLM(model, kv_disk_path=str(tmp_path / "kv"))
    told = "kv_disk_path: no effect, since every layer of this `MistralForCausalLM` has a sliding window"
    assert told in caplog.text and not (tmp_path / "kv").exists()


def test_a_path_that_is_no_directory_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadRequest, match=r"kv_disk_path is .*file"):
        LLM(tiny_model, kv_disk_path=str(tmp_path / "file"))
    with pytest.raises(BadRequest, match=r"kv_disk_size is 0\.000 GiB"):
        LLM(tiny_model, kv_disk_path=str(tmp_path), kv_disk_size=0)
