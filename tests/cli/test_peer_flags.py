"""Commands typed from the guides of other engines."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from quire.cli.flags import read_flags
from quire.cli.parser import UsageError
from quire.cli.sampling import SamplingFlags
from quire.cli.serve import make_parser
from quire.engine.options import EngineOptions
from quire.engine.peer_options import PEER_OPTIONS, SHORT_FLAGS, Only, Renamed
from quire.server.options import ServerOptions

PAGE = Path(__file__).parents[2] / "docs" / "other-engines.md"


def read(command: str) -> tuple[EngineOptions, ServerOptions, argparse.Namespace]:
    arguments = make_parser().parse(command.split())
    return read_flags(EngineOptions, arguments), read_flags(ServerOptions, arguments), arguments


def test_vllm_serve(capsys: pytest.CaptureFixture[str]) -> None:
    engine, server, _ = read(
        "--model m --tensor-parallel-size 1 -pp 1 --quantization awq --dtype half --disable-log-requests --port 9 "
        "--trust-remote-code --gpu-memory-utilization 0.8 --enable-chunked-prefill --enable-auto-tool-choice "
        "--tool-call-parser hermes --generation-config vllm --max-logprobs 5 --api-key k --uvicorn-log-level warning"
    )
    assert engine == EngineOptions(
        model="m", quantization="awq", dtype="float16", gpu_memory_utilization=0.8, generation_config="vllm"
    )
    assert server == ServerOptions(port=9, api_key=["k"], tool_call_parser="hermes")
    told = capsys.readouterr().err.splitlines()
    flags = ["--disable-log-requests", "--trust-remote-code", "--enable-chunked-prefill", "--enable-auto-tool-choice"]
    assert [line.split(" has no effect: ")[0] for line in told] == [f"warning: {flag}" for flag in flags]


def test_text_generation_launcher() -> None:
    engine, server, arguments = read(
        "--model-id m --num-shard 1 --quantize gptq --max-total-tokens 4096 --max-batch-prefill-tokens 2048 "
        "--hostname 0.0.0.0 --port 80 --max-concurrent-requests 7 --cuda-memory-fraction 0.5 --json-output"
    )
    assert engine == EngineOptions(
        model="m",
        quantization="gptq",
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_queued_requests=7,
        gpu_memory_utilization=0.5,
    )
    assert server == ServerOptions(host="0.0.0.0", port=80) and arguments.log_format == "json"


def test_llama_server() -> None:
    engine, server, _ = read(
        "-m x.gguf -c 4096 -np 4 -ngl 99 -t 2 -b 256 -fa on -ctk q8_0 -ctv q8_0 -a x --host 0.0.0.0 --port 8080 "
        "--jinja --mlock --no-mmap"
    )
    assert engine == EngineOptions(
        model="x.gguf",
        max_model_len=4096,
        max_num_seqs=4,
        threads=2,
        max_num_batched_tokens=256,
        kv_cache_dtype="int8",
        served_model_name="x",
        gpu_layers=99,
    )
    assert server == ServerOptions(host="0.0.0.0", port=8080)
    assert read("-hf owner/name:Q4_K_M -c 0 -fa --ctx-size 0 -np -1")[0] == EngineOptions(model="owner/name:Q4_K_M")


def test_sglang() -> None:
    engine, server, _ = read(
        "--model-path m --tp 1 --mem-fraction-static 0.7 --context-length 2048 --chunked-prefill-size 1024 "
        "--schedule-policy priority --disable-radix-cache --random-seed 3 --log-requests --is-embedding"
    )
    assert engine == EngineOptions(
        model="m",
        gpu_memory_utilization=0.7,
        max_model_len=2048,
        max_num_batched_tokens=1024,
        scheduling_policy="priority",
        enable_prefix_caching=False,
        seed=3,
        task="embed",
    )
    assert server == ServerOptions(access_log=True)


def test_caches_beyond_the_pool_by_their_names_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    sglang, _, _ = read(
        "--enable-hierarchical-cache --hicache-size 30 --hicache-write-policy write_through --page-size 64"
    )
    assert sglang == EngineOptions(kv_offloading_size=30.0, block_size=64)
    assert "kv_offloading_size (hicache_size)" in capsys.readouterr().err
    assert read("--kv-offloading-size 10 --kv-offloading-backend native")[0] == EngineOptions(kv_offloading_size=10.0)
    assert capsys.readouterr().err == ""
    llama, _, _ = read(
        "--no-cache-prompt -cram 8192 --cache-reuse 256 -dt 0.1 -sps 0.5 -ctxcp 8 --swa-full -kvu --kv-offload"
    )
    assert llama == EngineOptions(enable_prefix_caching=False)
    assert capsys.readouterr().err.count("has no effect") == 7


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("--kv-offloading-backend lmcache", "--kv-offloading-backend is lmcache.*\n.*kv_disk_path.*kv_offloading_size"),
        ("--slot-save-path /tmp/slots", "--slot-save-path is /tmp/slots.*\n.*kv_disk_path"),
        ("--prompt-cache a.bin --prompt-cache-all", "--prompt-cache is a.bin.*\n.*kv_disk_path"),
        ("-nkvo", "-nkvo is false.*\n.*gpu_layers"),
        ("--no-kv-offload", "--no-kv-offload is false.*\n.*gpu_layers"),
        ("--enable-hierarchical-cache --hicache-ratio 2", "--hicache-ratio is 2.*\n.*kv_offloading_size"),
        ("--hicache-storage-backend mooncake", "--hicache-storage-backend is mooncake.*\n.*kv_disk_path"),
        ("--enable-lmcache", "--enable-lmcache is true.*\n.*kv_disk_path"),
        ("--disaggregation-mode prefill", "--disaggregation-mode is prefill.*\n.*prefill_engines"),
        ("--sharded true", "--sharded is true"),
        ("--nnodes 2", "--nnodes is 2.*\n.*tensor_parallel_size"),
        ("--mamba-ssm-cache-dtype float16", "--mamba-ssm-cache-dtype is float16.*\n.*state_checkpoint_dtype"),
        ("--cpu-offload-gb much", "`much` is not a number"),
        ("--temp 0.5", "--override-generation-config"),
        ("--top-k 5", "--override-generation-config"),
        ("-n 64", "-n is 64.*\n.*--override-generation-config"),
        ("--schedule-policy lpm", "`lpm` is not one of fcfs, priority"),
        ("--ctx-size many", "`many` is not a whole number"),
        ("--uvicorn-log-level loud", "`loud` is not one of"),
        ("--max-modl-len 5", "did you mean `--max-model-len`"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(command: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(command)


def test_aliases_name_options_that_exist() -> None:
    ours = {spec.name for options in (EngineOptions, ServerOptions, SamplingFlags) for spec in fields(options)}
    ours |= {"log_level", "log_format"}
    for name, peer in PEER_OPTIONS.items():
        assert name not in ours, f"{name} is an option of ours"
        assert not isinstance(peer, Renamed) or peer.option in ours, name
    assert {name for name in SHORT_FLAGS.values() if name not in PEER_OPTIONS} <= ours


def test_every_value_that_asks_for_nothing_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    for name, peer in PEER_OPTIONS.items():
        if isinstance(peer, Only) and peer.values and not peer.switch:
            make_parser().parse([f"--{name.replace('_', '-')}", peer.values[0]])
    assert capsys.readouterr().err == "", "what is so anyway needs no warning"


def test_help_shows_our_names_only() -> None:
    text = make_parser().format_help()
    assert "--model-id" not in text and "--n-gpu-layers" not in text and "--max-model-len" in text


def test_the_page_for_users_of_other_engines_has_every_name_and_its_reason() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    listed = {name: row for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    assert listed.keys() == PEER_OPTIONS.keys()
    for name, peer in PEER_OPTIONS.items():
        assert (f"`{peer.option}`" if isinstance(peer, Renamed) else peer.reason) in listed[name], name
    assert all(f"`{flag}`" in PAGE.read_text() for flag in SHORT_FLAGS)
