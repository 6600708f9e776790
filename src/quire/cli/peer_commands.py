"""Commands that people type from the guides of other tools, and what they are called here."""

HINTS = {
    "list": "`quire models` lists the models that are here",
    "ls": "`quire models` lists the models that are here",
    "show": "`quire plan MODEL` shows what a model needs, and /v1/models of a server what it serves",
    "ps": "GET /api/ps of a server has its models, and / of it is a page that shows it at work",
    "stop": "a server ends with Ctrl-C or SIGTERM, after the requests in flight",
    "start": "`quire serve [MODEL]` starts a server",
    "launch_server": "`quire serve [MODEL]` starts a server",
    "launch": "`quire serve [MODEL]` starts a server",
    "rm": "models are files: `quire models` shows where they are",
    "download": "`quire pull MODEL` downloads a model",
    "create": "`quire quantize MODEL OUT` writes a model in another format",
    "convert": "`quire quantize MODEL OUT` writes a model in another format",
    "complete": "`quire run --raw PROMPT` continues a text",
    "generate": "`quire run PROMPT` answers one prompt",
    "collect-env": "`quire doctor` shows what this machine has",
    "env": "`quire doctor` shows what this machine has",
    "rerank": "`quire embed --score QUERY TEXT ...` scores texts against a query",
    "perplexity": "`quire quantize --table MODEL` measures it, and `quire bench compare formats`",
    "router": "`quire gateway` is one address in front of many engines",
}
