"""Flags of vllm-router, sgl-router and LiteLLM's proxy that `quire gateway` has under another name, or in its file."""

from collections.abc import Iterable

from quire.cli.parser import UsageError

APART = "decode servers ask prefill servers themselves (docs/prefill-decode.md): give --worker the decode servers"
SERVICES = "`[[discovery.dns]]` of the configuration finds the pods of a headless service: deploy/kubernetes"
CACHE_AWARE = "[cache_aware] of the configuration"

ELSEWHERE = {
    **dict.fromkeys(["--prefill", "--decode", "--pd-disaggregation", "--vllm-pd-disaggregation"], APART),
    **dict.fromkeys(["--prefill-policy", "--decode-policy", "--prefill-selector", "--decode-selector"], APART),
    **dict.fromkeys(["--service-discovery", "--service-discovery-port", "--service-discovery-namespace"], SERVICES),
    **dict.fromkeys(["--selector", "--k8s-label-selector", "--k8s-namespace", "--k8s-port"], SERVICES),
    "--static-backends": "write --worker-urls, with spaces between the urls",
    "--static-models": "workers are asked for their models; `models` of [[workers]] says what they do not",
    "--routing-logic": "write --policy",
    "--session-key": "`session_header` of the configuration, and --policy session",
    "--cache-threshold": f"`cache_threshold` of {CACHE_AWARE}",
    "--balance-abs-threshold": f"`balance_abs_threshold` of {CACHE_AWARE}",
    "--balance-rel-threshold": f"`balance_rel_threshold` of {CACHE_AWARE}",
    "--max-tree-size": f"`max_blocks` of {CACHE_AWARE}",
    "--max-payload-size": "`max_body_bytes` of the configuration",
    "--request-timeout-secs": "`response_timeout` of [faults]",
    "--max-concurrent-requests": "`max_in_flight` of [[workers]]; more wait at the gateway",
    "--queue-size": "`max_requests` of [queue]",
    "--queue-timeout-secs": "`max_seconds` of [queue]",
    "--rate-limit-tokens-per-second": "`requests_per_minute` and `tokens_per_minute` of [[keys]]",
    "--retry-max-retries": "`max_attempts` of [faults], which is one more",
    "--disable-retries": "`max_attempts = 1` of [faults]",
    "--cb-failure-threshold": "`breaker_failures` of [faults]",
    "--cb-timeout-duration-secs": "`breaker_seconds` of [faults]",
    "--health-check-interval-secs": "`health_interval` of [faults]",
    "--health-check-endpoint": "workers are asked for /health and /ready",
    **dict.fromkeys(["--prometheus-port", "--prometheus-host"], "/metrics is at the admin listener: --admin-port"),
    "--dp-aware": "a server with --data-parallel-size shares its load itself: name it once",
    **dict.fromkeys(
        ["--tls-cert-path", "--ssl-certfile", "--ssl-certfile-path"], "`ssl_certfile` of the configuration"
    ),
    **dict.fromkeys(["--tls-key-path", "--ssl-keyfile", "--ssl-keyfile-path"], "`ssl_keyfile` of the configuration"),
    **dict.fromkeys(["--model-path", "--tokenizer-path"], "`tokenizer` of [models.NAME], for --policy cache_aware"),
    **dict.fromkeys(["--model", "--alias"], "workers are asked for their models; names of your own are [models.NAME]"),
    "--api-base": "write --worker, without /v1",
    "--num-workers": "one process takes thousands of requests a second; several gateways share limits by [redis]",
    **dict.fromkeys(["--debug", "--detailed-debug"], "write --log-level debug"),
}


def check_flags(argv: Iterable[str]) -> None:
    """Raises UsageError for the first flag of another router, with what to write instead."""
    for argument in argv:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and (hint := ELSEWHERE.get(flag.replace("_", "-"))) is not None:
            raise UsageError(f"there is no flag `{flag}`", hint)
