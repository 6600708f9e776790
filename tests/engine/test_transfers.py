"""Prompts computed by another engine: the answers of an engine alone, bit for bit, whatever is asked."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from engine.prefill_thread import PrefillThread
from models.lora_files import adapter
from quire import LLM, LoRARequest, SamplingParams
from quire.core import remote_prefills
from quire.core.errors import BadRequest, QuireError
from quire.core.records import TransferStats
from quire.core.request import Request
from quire.core.structured import Structured
from quire.core.transfer_config import read_transfer_config
from quire.runtime.kv_transfer import consumer as consuming
from quire.runtime.kv_transfer import producer as producing

PROMPTS = [
    "A quire is four sheets of paper or parchment folded to form eight leaves, as in medieval manuscripts. " * 2,
    "A quire is four sheets of paper or parchment folded to form eight leaves. " + "Then the binder sews them. " * 4,
    "The word is also used for twenty-five sheets of the same size and quality, one twentieth of a ream of paper.",
]
COMMON: dict[str, Any] = {"max_tokens": 20, "seed": 5, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, logprobs=3, **COMMON),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, logprobs=1, **COMMON),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logprobs=0, **COMMON
    ),
    "DRY": SamplingParams(temperature=0.7, dry_multiplier=0.8, logit_bias={70: 2.0}, logprobs=0, **COMMON),
    "mirostat": SamplingParams(mirostat=2, logprobs=0, **COMMON),
    "several": SamplingParams(n=3, temperature=1.0, logprobs=0, **COMMON),
    "best_of": SamplingParams(n=1, best_of=3, temperature=1.0, logprobs=0, **COMMON),
    "beams": SamplingParams(beam_width=3, n=2, temperature=0, max_tokens=12, logprobs=0),
    "structured": SamplingParams(
        temperature=1.0, seed=3, max_tokens=30, structured=Structured("regex", "[a-z ]{24}"), logprobs=0
    ),
    "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=1, logprobs=0, max_tokens=4),
    "min_tokens": SamplingParams(
        temperature=1.0, seed=9, min_tokens=10, max_tokens=20, stop_token_ids=[70], logprobs=0
    ),
}
Bits = list[Any]


def bits(llm: LLM, prompts: list[str], params: SamplingParams, lora: LoRARequest | None = None) -> Bits:
    """All numbers of the answers: tokens, logprobs, and those of the prompt."""
    answers = []
    for result in llm.generate(prompts, params, lora_request=lora, use_tqdm=False):
        outputs = [(o.token_ids, o.logprobs, o.cumulative_logprob, o.finish_reason) for o in result.outputs]
        answers.append((outputs, result.prompt_logprobs))
    return answers


@contextmanager
def consumer(model: Path, *addresses: str, **options: Any) -> Iterator[LLM]:
    config = {"kv_role": "kv_consumer", "kv_peers": list(addresses)}
    llm = LLM(model, max_num_seqs=4, kv_transfer_config=config, **options)
    try:
        yield llm
    finally:
        llm.engine.stop()


def transfers(llm: LLM) -> TransferStats:
    stats = llm.engine.stats().transfers
    assert stats is not None
    return stats


def wait_for(met: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def connected(llm: LLM, count: int = 1) -> LLM:
    wait_for(lambda: transfers(llm).peers == count)
    return llm


@pytest.fixture(scope="module")
def cold(tiny_model: Path) -> dict[str, Bits]:
    """One engine alone, each prompt by itself."""
    llm = LLM(tiny_model, max_num_seqs=4, enable_prefix_caching=False)
    return {name: [bits(llm, [prompt], params)[0] for prompt in PROMPTS] for name, params in PARAMS.items()}


@pytest.fixture(params=["shared memory", "TCP"])
def prefill(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[PrefillThread, str]]:
    address = f"unix:{tmp_path}/prefill" if request.param == "shared memory" else "127.0.0.1:0"
    with PrefillThread(tiny_model, address) as engine:
        yield engine, address if request.param == "shared memory" else engine.address


def test_every_kind_of_request_gets_the_bits_of_one_engine(
    tiny_model: Path, prefill: tuple[PrefillThread, str], cold: dict[str, Bits]
) -> None:
    engine, address = prefill
    with consumer(tiny_model, address) as llm:
        connected(llm)
        for name, params in PARAMS.items():
            before = transfers(llm).prefills
            assert [bits(llm, [prompt], params)[0] for prompt in PROMPTS] == cold[name], name
            assert transfers(llm).prefills == before + (0 if name == "prompt logprobs" else 3)
            assert llm.engine._scheduler.kv_blocks.host.num_held == 0
            llm.reset_prefix_cache()
        assert transfers(llm).failed == 0
    assert engine.sent_bytes > 0


def test_what_another_engine_computes_is_no_hit_of_the_prefix_cache(tiny_model: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/prefill"
    with PrefillThread(tiny_model, address), consumer(tiny_model, address) as llm:
        one = LLM(tiny_model, max_num_seqs=4)
        for prompt in [*PROMPTS, *PROMPTS]:
            here, there = (each.generate(prompt, PARAMS["greedy"], use_tqdm=False)[0] for each in (one, connected(llm)))
            assert there.num_cached_tokens == here.num_cached_tokens
        assert transfers(llm).prefills == 3


def test_a_prompt_that_the_prefill_engine_has_answered_is_not_computed_again(tiny_model: Path, tmp_path: Path) -> None:
    """A proxy may have asked it first, as one in front of vLLM does."""
    address, ids = f"unix:{tmp_path}/prefill", list(range(20, 220))
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, seed=0)
    engine = PrefillThread(tiny_model, address)
    engine.engine.submit(Request(id="by the proxy", prompt_ids=ids, params=replace(params, max_tokens=1)))
    with consumer(tiny_model, address) as llm, engine:
        wait_for(lambda: not engine.engine._scheduler.groups.has_work)
        [answer] = connected(llm).generate([ids], params, use_tqdm=False)
        assert transfers(llm).tokens == len(ids) - 1
        hits = engine.engine._scheduler.stats().prefix_hits
    assert hits == 12 * 16, "all full blocks of the prompt"
    [alone] = LLM(tiny_model, max_num_seqs=4).generate([ids], params, use_tqdm=False)
    assert answer.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_other_types_of_cache_move_too(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    alone = bits(LLM(tiny_model, kv_cache_dtype=dtype), PROMPTS, PARAMS["sampled"])
    address = f"unix:{tmp_path}/prefill"
    with (
        PrefillThread(tiny_model, address, kv_cache_dtype=dtype, max_num_batched_tokens=32),
        consumer(tiny_model, address, kv_cache_dtype=dtype) as llm,
    ):
        assert bits(connected(llm), PROMPTS, PARAMS["sampled"]) == alone
        assert transfers(llm).prefills == 3


def test_without_prefix_caching_prompts_move_too(tiny_model: Path, tmp_path: Path, cold: dict[str, Bits]) -> None:
    address = f"unix:{tmp_path}/prefill"
    with PrefillThread(tiny_model, address), consumer(tiny_model, address, enable_prefix_caching=False) as llm:
        for _ in range(2):
            assert bits(connected(llm), PROMPTS, PARAMS["sampled"]) == cold["sampled"]
        assert transfers(llm).prefills == 6


def test_an_adapter_is_known_by_its_numbers(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for number, name in enumerate(("sql", "poems")):
        adapter(model, tmp_path / name, number, r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    requests = {name: LoRARequest(name, 1, str(tmp_path / name)) for name in ("sql", "poems")}
    alone = LLM(tiny_model, enable_lora=True)
    expected = {name: bits(alone, PROMPTS[:1], PARAMS["greedy"], lora) for name, lora in requests.items()}
    assert expected["sql"] != expected["poems"]
    address = f"unix:{tmp_path}/prefill"
    with PrefillThread(tiny_model, address, enable_lora=True) as engine:
        engine.add_adapter("another name", tmp_path / "sql")
        with consumer(tiny_model, address, enable_lora=True) as llm:
            connected(llm)
            for name, lora in requests.items():
                assert bits(llm, PROMPTS[:1], PARAMS["greedy"], lora) == expected[name]
            stats = transfers(llm)
            assert stats.failed == remote_prefills.MAX_PREFILLS and stats.prefills == stats.failed + 1


def test_the_least_busy_engine_is_asked_and_without_any_prompts_are_computed_here(
    tiny_model: Path, tmp_path: Path, cold: dict[str, Bits]
) -> None:
    addresses = [f"unix:{tmp_path}/{name}" for name in ("one", "two")]
    with consumer(tiny_model, *addresses) as llm:
        assert bits(llm, PROMPTS, PARAMS["greedy"])[0][0] == cold["greedy"][0][0] and transfers(llm).prefills == 0
        llm.reset_prefix_cache()
        with PrefillThread(tiny_model, addresses[0]) as one, PrefillThread(tiny_model, addresses[1]) as two:
            connected(llm, 2)
            assert bits(llm, PROMPTS, PARAMS["greedy"]) == cold["greedy"]
            assert one.sent_bytes and two.sent_bytes
        wait_for(lambda: transfers(llm).peers == 0)
        llm.reset_prefix_cache()
        assert bits(llm, PROMPTS, PARAMS["greedy"])[2] == cold["greedy"][2] and transfers(llm).prefills == 3


def test_an_engine_of_another_kind_is_refused_and_says_why(
    tiny_model: Path, tmp_path: Path, cold: dict[str, Bits], caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/prefill"
    for options, reason in (
        ({"kv_cache_dtype": "int8"}, "its kv_cache_dtype is 'float16', and here it is 'int8'"),
        ({"block_size": 32}, "its block_size is 16, and here it is 32"),
        ({"max_model_len": 300}, "max_model_len differs"),
    ):
        caplog.clear()
        with PrefillThread(tiny_model, address, **options), consumer(tiny_model, address) as llm:
            wait_for(lambda: "refuses this one" in caplog.text)
            assert reason in caplog.text
            assert bits(llm, PROMPTS, PARAMS["sampled"]) == cold["sampled"] and transfers(llm).prefills == 0


def test_a_damaged_block_is_not_taken(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, cold: dict[str, Bits], caplog: pytest.LogCaptureFixture
) -> None:
    sent = 0

    def wrong(payload: Any) -> bytes:
        nonlocal sent
        sent += 1
        return b"another" if sent == 6 else checksum(payload)

    checksum = producing.checksum
    monkeypatch.setattr(producing, "checksum", wrong)
    with PrefillThread(tiny_model, "127.0.0.1:0") as engine, consumer(tiny_model, engine.address) as llm:
        assert bits(connected(llm), PROMPTS[:1], PARAMS["sampled"]) == cold["sampled"][:1]
        assert "another checksum" in caplog.text and transfers(llm).failed >= 1
        wait_for(lambda: transfers(llm).peers == 1)
        assert bits(llm, PROMPTS[1:], PARAMS["sampled"]) == cold["sampled"][1:]


@pytest.mark.parametrize("is_local", [True, False], ids=["shared memory", "TCP"])
def test_an_engine_that_stops_in_the_middle_is_given_up(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cold: dict[str, Bits],
    is_local: bool,
) -> None:
    """Its loop hangs after the first blocks: the answer is the same, and host blocks come back when it has ended."""
    monkeypatch.setattr(consuming, "STALL_SECONDS", 0.4)
    address = f"unix:{tmp_path}/prefill" if is_local else "127.0.0.1:0"
    with PrefillThread(tiny_model, address, max_num_batched_tokens=32) as engine:
        step, hangs, num_steps = engine.engine.step, False, 0

        def hang() -> Any:
            nonlocal hangs, num_steps
            num_steps += 1
            if num_steps > 4:  # of seven
                wait_for(lambda: engine.sent_bytes > 0)  # by a thread of its own
                hangs = True
                wait_for(lambda: not hangs)
            return step()

        monkeypatch.setattr(engine.engine, "step", hang)
        with consumer(tiny_model, address if is_local else engine.address) as llm:
            assert bits(connected(llm), PROMPTS[:1], PARAMS["sampled"]) == cold["sampled"][:1]
            assert transfers(llm).failed == 1 and hangs
            hangs = False
            monkeypatch.setattr(engine.engine, "step", step)
            host = llm.engine._scheduler.kv_blocks.host

            def all_given_back() -> bool:
                if llm.engine.has_work:
                    llm.engine.step()
                return host.num_held == 0

            wait_for(all_given_back)


def test_a_full_host_and_a_full_pool_delay_and_lose_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: dict[str, Bits]
) -> None:
    monkeypatch.setattr("quire.runtime.kv.MIN_STAGED_BLOCKS", 4)
    monkeypatch.setattr("quire.runtime.kv.MAX_STAGED_BYTES", 1)
    address = f"unix:{tmp_path}/prefill"
    block = 2 * 2 * 3 * 16 * 2 * 16  # bytes: K and V, layers, heads, columns, bytes, tokens
    small = {"kv_cache_memory_bytes": 40 * block, "max_model_len": 512}
    with PrefillThread(tiny_model, address, **small), consumer(tiny_model, address, **small) as llm:
        assert bits(connected(llm), PROMPTS * 2, PARAMS["sampled"])[:3] == cold["sampled"]
        assert 0 < transfers(llm).tokens < 3 * 64 + 1
        assert llm.engine._scheduler.kv_blocks.host.num_held == 0


def test_names_of_clients_cannot_break_it(tiny_model: Path, tmp_path: Path) -> None:
    """A salt of any length, and the id of a prefill as that of a request to the prefill engine."""
    address, ids = f"unix:{tmp_path}/prefill", list(range(20, 220))
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, seed=0)
    engine = PrefillThread(tiny_model, address)
    engine.engine.submit(Request(id="prefill/0/1", prompt_ids=ids, params=replace(params, max_tokens=300)))
    with consumer(tiny_model, address) as llm:
        connected(llm)
        for number, salt in enumerate(("a" * 10_000, "b" * 10_000)):
            llm.engine.submit(Request(id=f"r{number}", prompt_ids=ids, params=params, salt=salt))
        tokens: dict[str, list[int]] = {"r0": [], "r1": []}
        with engine:
            while llm.engine._scheduler.groups.has_work:
                for event in llm.engine.step():
                    tokens[event.request_id] += event.tokens
        assert tokens["r0"] == tokens["r1"] and len(tokens["r0"]) == 3
        stats = transfers(llm)
        assert stats.prefills - stats.failed == 2 and stats.tokens == 2 * (len(ids) - 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is no JSON object"),
        ("{}", "kv_role None.*choose from kv_producer, kv_consumer"),
        ('{"kv_role": "kv_both"}', "kv_role 'kv_both'.*clients ask that one"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', "one server is the kv_producer.*kv_consumer"),
        ('{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}', "kv_disk_path DIR.*kv_offloading_size GIB"),
        (
            '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
            '"kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240}}',
            "leave kv_transfer_config out.*kv_offloading_size 10,",
        ),
        ('{"kv_role": "kv_consumer", "kv_connector_module_path": "mine"}', "no code is loaded"),
        ('{"kv_role": "kv_consumer", "kv_prot": 1}', "`kv_prot`.*did you mean kv_port"),
        ('{"kv_role": "kv_consumer", "kv_port": 70000}', "kv_port 70000"),
        ('{"kv_role": "kv_consumer", "kv_ip": 7}', "kv_ip 7"),
        ('{"kv_role": "kv_consumer", "kv_peers": ["here"]}', "HOST:PORT"),
        ('{"kv_role": "kv_producer", "kv_peers": ["a:1", "b:2"]}', "one for a kv_producer"),
        ('{"kv_role": "kv_consumer", "kv_peers": ["a:1"], "kv_port": 2}', "mean the same"),
        ('{"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}', "kv_load_failure_policy 'fail'"),
    ],
)
def test_a_wrong_config_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(QuireError, match=reason):
        try:
            read_transfer_config(text)
        except QuireError as error:
            raise type(error)(f"{error.message} {error.hint}") from None


def test_a_config_of_vllm_is_understood() -> None:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_ip": "10.0.0.1", "kv_port": "14579"}
    read = read_transfer_config(json.dumps({**config, "kv_rank": 1, "kv_load_failure_policy": "recompute"}))
    assert read.addresses == ("10.0.0.1:14579",) and not read.is_producer
    assert read.without_effect == ("kv_connector", "kv_rank", "kv_load_failure_policy")


def test_what_cannot_be_had_is_refused_by_name(tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="an LLM computes nothing between its calls"):
        LLM(tiny_model, kv_transfer_config={"kv_role": "kv_producer"})
    with PrefillThread(tiny_model, "127.0.0.1:0") as engine, pytest.raises(BadRequest, match="nothing can listen on"):
        PrefillThread(tiny_model, engine.address)
