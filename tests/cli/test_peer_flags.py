"""Commands typed from the guides of other engines."""

import argparse
import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest

from quire.cli.flags import read_flags
from quire.cli.main import main
from quire.cli.parser import UsageError
from quire.cli.sampling import SamplingFlags
from quire.cli.serve import make_parser
from quire.engine.options import EngineOptions
from quire.engine.peers import PEER_OPTIONS, SHORT_FLAGS
from quire.engine.peers.kinds import Only, Renamed
from quire.engine.peers.llama_server import LLAMA_SERVER
from quire.engine.peers.sglang import SGLANG
from quire.engine.peers.tgi import TGI
from quire.engine.peers.transformers import TRANSFORMERS
from quire.engine.peers.vllm import VLLM
from quire.server.options import ServerOptions

ROOT = Path(__file__).parents[2]


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


def test_llama_server_with_a_draft_model_and_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    engine, server, arguments = read(
        "-m x.gguf -md draft.gguf --draft-max 4 --draft-min 1 -ngld 99 --chat-template-file t.jinja --reasoning off "
        "--reasoning-format deepseek --ssl-key-file k.pem --ssl-cert-file c.pem --models-max 3 --no-webui -lv 4 "
        "--sleep-idle-seconds 300 "
        "--no-cache-prompt -cram 4096 -kvu --cors-origins http://a --sse-ping-interval -1 --no-warmup --log-jsonl"
    )
    assert engine == EngineOptions(
        model="x.gguf", spec_model="draft.gguf", spec_tokens=4, chat_template="t.jinja", enable_prefix_caching=False
    )
    assert engine.speculation is not None and engine.speculation.method == "draft_model"
    assert server == ServerOptions(
        chat_template_kwargs='{"enable_thinking": false}',
        reasoning_parser="auto",
        ssl_keyfile="k.pem",
        ssl_certfile="c.pem",
        max_loaded_models=3,
        allowed_origins=["http://a"],
        sse_keep_alive=0,
        sleep_idle_seconds=300,
    )
    assert (arguments.log_level, arguments.log_format) == ("debug", "json")
    told = [line.split(" has no effect: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == [
        f"warning: {flag}" for flag in ("--draft-min", "-ngld", "--no-webui", "-cram", "-kvu", "--no-warmup")
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("-md d.gguf --draft-max 16 --draft-min 1 --draft-p-min 0.75 -cd 4096 -ngld 99", ("draft_model", 16, "d.gguf")),
        ("-hfd owner/name:Q4_0", ("draft_model", 3, "owner/name:Q4_0")),
        ("--spec-type none -md d.gguf", ("draft_model", 3, "d.gguf")),
        ("--spec-type ngram-simple --draft-max 64 --spec-ngram-size-n 8", ("ngram", 64, "")),
        ("--spec-type ngram-mod,draft-simple -md d.gguf", ("suffix,draft_model", 24, "d.gguf")),
        ("--spec-type draft-mtp --spec-draft-n-max 2", ("mtp", 2, "")),
        ("--spec-type draft-eagle3 --spec-draft-model ./head", ("eagle3", 3, "./head")),
        ("--spec-default", ("suffix", 24, "")),
        ("--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1", ("mtp", 3, "")),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path ./head", ("eagle3", 3, "./head")),
        ("--speculative-algorithm STANDALONE --speculative-draft-model-path ./d", ("draft_model", 3, "./d")),
        ("--speculative-model [ngram] --num-speculative-tokens 4", ("ngram", 4, "")),
        ("--spec-method eagle --spec-model ./head --spec-tokens 2", ("eagle", 2, "./head")),
        ('-sc {"method":"deepseek_mtp","num_speculative_tokens":1}', ("mtp", 1, "")),
        ("--spec-model yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", ("eagle3", 3, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")),
        ("--spec-type none", None),
    ],
)
def test_speculative_decoding(command: str, expected: tuple[str, int, str] | None) -> None:
    found = read(command)[0].speculation
    assert (found and (found.method, found.num_tokens, found.model)) == expected


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
    engine, _, _ = read(
        "--model-path m --speculative-algorithm EAGLE3 --speculative-draft-model-path h --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --enable-priority-scheduling"
    )
    assert engine == EngineOptions(
        model="m", spec_method="EAGLE3", spec_model="h", spec_tokens=3, scheduling_policy="priority"
    )


def test_devices_as_other_engines_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("-tp 2 -pp 3 -dp 4 -ep --data-parallel-backend ray")[0] == EngineOptions(
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        data_parallel_size=4,
        enable_expert_parallel=True,
        distributed_executor_backend="ray",
    )
    assert read("--distributed-executor-backend uni --nnodes 1 --node-rank 0 -sm none -mg 0")[0] == EngineOptions()
    for written, device in (("--device none", "cpu"), ("-dev CUDA0", "cuda"), ("--device-map cpu", "cpu")):
        assert read(written)[0].device == device
    assert EngineOptions.of({"device_map": {"": "cpu"}}).device == "cpu"
    assert EngineOptions.of({"device_map": "auto"}).device == "auto"
    assert capsys.readouterr().err == ""
    read("--all2all-backend pplx --enable-eplb --data-parallel-address 10.0.0.1 --disable-custom-all-reduce")
    assert capsys.readouterr().err.count(" has no effect: ") == 4


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
        ("--nnodes 2", "--nnodes is 2.*\n.*quire stage MODEL --listen.*pipeline_stages"),
        ("--node-rank 1", "--node-rank is 1.*\n.*quire stage"),
        ("-dp 4 --data-parallel-size-local 2", "--data-parallel-size-local is 2.*\n.*ray.*quire gateway"),
        ("--data-parallel-hybrid-lb", "--data-parallel-hybrid-lb is true.*\n.*quire gateway"),
        ("--distributed-executor-backend external_launcher", "not one of mp, ray\n.*without torchrun"),
        ("--device cuda:1", "--device: `cuda:1` is not one of auto, cpu, cuda\n.*CUDA_VISIBLE_DEVICES"),
        ("--device-map balanced", "`balanced` is not one of auto, cpu, cuda\n.*tensor_parallel_size"),
        ("-ngl 99 -ncmoe 8", "-ncmoe is 8.*\n.*cpu_layers.*offload_weights"),
        ("-ot exps=CPU", "-ot is exps=CPU.*\n.*cpu_layers"),
        ("-sm row -ts 3,1", "-sm is row.*\n.*tensor_parallel_size"),
        ("-mg 1", "-mg is 1.*\n.*CUDA_VISIBLE_DEVICES"),
        ("--rpc 10.0.0.1:50052", "--rpc is 10.*\n.*pipeline_stages"),
        ("--mamba-ssm-cache-dtype float16", "--mamba-ssm-cache-dtype is float16.*\n.*state_checkpoint_dtype"),
        ("--cpu-offload-gb much", "`much` is not a number"),
        ("--temp 0.5", "--override-generation-config"),
        ("--top-k 5", "--override-generation-config"),
        ("-n 64", "-n is 64.*\n.*--override-generation-config"),
        ("--schedule-policy lpm", "`lpm` is not one of fcfs, priority"),
        ("--ctx-size many", "`many` is not a whole number"),
        ("--uvicorn-log-level loud", "`loud` is not one of"),
        ("--speculate 3", "--speculate is 3.*\n.*spec_method is ngram"),
        ("--speculative-eagle-topk 4", "--speculative-eagle-topk is 4.*\n.*tree_nodes"),
        ("--lora a.gguf", "--lora is a.gguf.*\n.*lora_modules NAME=PATH"),
        ("--n-cpu-moe 4", "--n-cpu-moe is 4.*\n.*cpu_layers"),
        ("--slot-save-path d", "kv_disk_path"),
        ("--api-key-file f", "keys_file"),
        ("--dry-multiplier 1", "--dry-multiplier is 1.*\n.*requests say it"),
        ("-cmoe", "-cmoe is true.*\n.*cpu_layers"),
        ("--disaggregation-mode prefill", "prefill_engines"),
        ("--list-devices", "quire doctor"),
        ("--max-modl-len 5", "did you mean `--max-model-len`"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(command: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(command)


def test_a_short_flag_that_a_command_lacks_is_not_ambiguous(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-dp", "2", "hi"]) == 2
    assert "there is no flag `-dp`" in capsys.readouterr().err


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


def test_the_page_for_users_of_other_engines_is_what_the_tables_say() -> None:
    path = ROOT / "tools" / "other_engines_page.py"
    spec = importlib.util.spec_from_file_location("other_engines_page", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.page() == tool.PAGE.read_text(), f"the page is stale: run python {path.relative_to(ROOT)}"
    assert {name for table in tool.TABLES.values() for name in table} == PEER_OPTIONS.keys()


def test_no_name_stands_in_two_tables() -> None:
    assert len(PEER_OPTIONS) == sum(map(len, (VLLM, TGI, LLAMA_SERVER, SGLANG, TRANSFORMERS)))
