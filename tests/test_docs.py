"""The documentation names what exists: files, flags, commands, classes, functions, links; and in one vocabulary."""

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from quire.cli import main, parser
from quire.cli.bench import command as bench

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "quire"
REFERENCE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")]  # must be true today
REFERENCE += sorted((ROOT / "docs").glob("*.md"))
HISTORY = [ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]  # was true when it was written
HISTORY += sorted((ROOT / "docs" / "decisions").glob("*.md"))
GLOSSARY = ROOT / "docs" / "glossary.md"
MAX_COLUMNS = 120

SOURCES = ["src/quire", "native", "tests", "benchmarks", "tools"]
CODE = {".py", ".cpp", ".h", ".c", ".js", ".sh"}
BASES = ["", "src/quire/", "src/", "docs/", "native/", "src/quire/ops/gpu/", "src/quire/server/", "src/quire/weights/"]
NOT_CPP = re.compile(r"(?m)(?:^|\s)//.*$")
NOT_PYTHON = re.compile(r'"""(?:.|\n)*?"""|(?m:^\s*#.*$|  #.*$)')
WORD = re.compile(r"[A-Za-z_]\w*")
CLASS = re.compile(r"^class (\w+)(.*):((?:\n(?:[ )].*)?)*)", re.MULTILINE)

# Names in backticks that belong to other programs.
FOREIGN_NAMES = """
PyTorch cudaHostRegister terminationGracePeriodSeconds preStop JSON_SCHEMA XDG_CACHE_HOME HF_HUB_OFFLINE HF_TOKEN
OLLAMA_HOST OTEL_EXPORTER_OTLP_ENDPOINT ModelCompressor TorchLinear HQQLinear EetqConfig FineGrainedFP8Config
pack_original dequantize_weight from_linear dequantize_gemm dequantize_4bit convert_moe_packed_tensors
cutlass_preprocessors n_positions gemv_fast QUIRE_MAX_WAIT QUIRE_MAX_MODEL_LEN QUIRE_API_KEY no_repeat_ngram_size
encoder_no_repeat_ngram_size output_tokens_count multipleOf propertyNames dependentSchemas begin_suppress_tokens
rpm_limit tpm_limit LMCACHE_LOCAL_CPU LMCACHE_MAX_LOCAL_CPU_SIZE max_local_cpu_size LMCACHE_CONFIG_FILE
LMCACHE_LOCAL_DISK LMCACHE_MAX_LOCAL_DISK_SIZE LMCACHE_REMOTE_URL LMCACHE_CHUNK_SIZE
"""
FOREIGN_FLAGS = {"--no-deps", "--tokenizer", "--build-arg", "--api-base"}

# Retired words in phrases where they are right.
HONEST = [r"\b(?:error|exit|status|HTTP) codes\b", r"\bCascade Lake\b", r"\bmixture of experts\b", r"\bdot products?\b"]


class Line:
    """One line of a page, with its code spans; `kind` is prose, table, heading, or what a code fence says it holds."""

    def __init__(self, path: Path, number: int, text: str, kind: str) -> None:
        self.path, self.number, self.text, self.kind = path, number, text, kind
        self.fenced = kind not in ("prose", "table", "heading")
        self.spans = [] if self.fenced else re.findall(r"`([^`]+)`", text)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.number}"

    @property
    def code(self) -> list[str]:
        return [self.text] if self.fenced else self.spans


@cache
def lines_of(path: Path) -> list[Line]:
    lines, fence = [], ""
    for number, text in enumerate(path.read_text().splitlines(), 1):
        stripped = text.strip()
        if stripped.startswith("```"):
            fence = "" if fence else stripped[3:] or "text"
            continue
        starts = {"|": "table", "#": "heading"}
        lines.append(Line(path, number, text, fence or starts.get(stripped[:1], "prose")))
    return lines


def reference_lines() -> Iterator[Line]:
    for path in REFERENCE:
        yield from lines_of(path)


def fail_if(problems: list[str]) -> None:
    assert not problems, "\n".join(problems)


# ---- what exists


@cache
def sources() -> dict[str, str]:
    """Path -> text, without comments and docstrings."""
    files = {path: path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in CODE}
    del files[Path(__file__)]
    return {
        path.relative_to(ROOT).as_posix(): (NOT_PYTHON if path.suffix == ".py" else NOT_CPP).sub("", text)
        for path, text in files.items()
    }


@cache
def names() -> set[str]:
    """Every word of the code."""
    return {word for text in sources().values() for word in WORD.findall(text)}


@cache
def members() -> dict[str, set[str]]:
    """Class of src/quire -> the words of its body, and of its bases'."""
    bases: dict[str, list[str]] = {}
    own: dict[str, set[str]] = {}
    for path, text in sources().items():
        if path.startswith("src/quire/") and path.endswith(".py"):
            for name, parents, body in CLASS.findall(text):
                bases[name] = WORD.findall(parents)
                own.setdefault(name, set()).update(WORD.findall(body))

    def collect(name: str) -> set[str]:
        return own.get(name, set()).union(*(collect(base) for base in bases.get(name, ()) if base != name))

    return {name: collect(name) for name in own}


@cache
def paths() -> set[str]:
    """All files and folders of the repository."""
    files = {*sources(), "tests/test_docs.py", *(path.name for path in ROOT.iterdir())}
    for folder in ("docs", "deploy", ".ci", "benchmarks", "src/quire"):
        files |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.suffix != ".pyc"}
    return files | {parent.as_posix() for path in files for parent in Path(path).parents}


def exists(path: str) -> bool:
    """A path from the root, from src/quire or from another well-known folder; or just the name of a file."""
    path = path.rstrip("/")
    if "*" in path:
        return any(fnmatch(there, f"{base}{path}") for there in paths() for base in BASES)
    return any(base + path in paths() for base in BASES) or ("/" not in path and path in file_names())


@cache
def file_names() -> set[str]:
    return {path.rpartition("/")[2] for path in paths()}


@cache
def flags() -> dict[str, set[str]]:
    """Of every command, its flags."""
    modules = {name: module for name, (module, _) in main.COMMANDS.items() if name != "bench"}
    modules |= {f"bench {name}": module for name, (module, _) in bench.COMMANDS.items()}
    return {command: _flags(import_module(module).run) for command, module in modules.items()}


def _flags(run: Callable[[list[str]], object]) -> set[str]:
    class Parsed(Exception):
        pass

    known: set[str] = set()

    def parse(self: parser.Parser, argv: list[str]) -> object:
        known.update(option for action in self._actions for option in action.option_strings)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(parser.Parser, "parse", parse)
        run([])
    return known


# ---- the checks


FILE = re.compile(r"(?<![\w./~$:@-])[\w*.][\w.*-]*(?:/[\w.*-]+)*\.(?:py|cpp|h|c|js|md|toml)\b(?![\w/(])")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.*-]+)+/?|[\w-]+/")


def test_files_that_are_named_exist() -> None:
    problems = []
    folders = {path.name for base in (ROOT, PACKAGE) for path in base.iterdir() if path.is_dir()} - {"build", "dist"}
    for line in reference_lines():
        if line.kind in ("python", "toml", "json", "console", "sh"):
            continue
        for span in line.code:
            named = FILE.findall(span)
            if not line.fenced and FOLDER.fullmatch(span) and span.split("/")[0] in folders:
                named = [span]
            problems += [f"{line}: there is no file `{path}`" for path in named if not exists(path)]
    fail_if(problems)


def test_commands_and_their_flags_exist() -> None:
    problems = []
    everywhere = set().union(*flags().values()) | FOREIGN_FLAGS
    everywhere |= {flag for text in sources().values() for flag in re.findall(r"[\"'](--[a-z][\w-]+)[\"']", text)}
    for line in reference_lines():
        for span in line.code:
            called = re.match(r"(?:\$ |# )?(?:\.venv/bin/)?quire ((?:bench )?[a-z][\w-]*)", span)
            if called:
                command = called[1]
                if command.split()[0] not in main.COMMANDS:
                    problems.append(f"{line}: there is no command `quire {command}`")
                known = flags().get(command, everywhere)
            elif line.fenced:
                continue
            else:
                known = everywhere
            words = re.sub(r"\"[^\"]*\"|'[^']*'", "", span.split("  #")[0])
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", words):
                if flag.replace("_", "-") not in known:
                    problems.append(
                        f"{line}: there is no flag `{flag}`" + (f" of `quire {called[1]}`" if called else "")
                    )
    fail_if(problems)


IDENTIFIER = re.compile(r"~?_*[A-Za-z]\w*(?:(?:\.|::)_*[A-Za-z]\w*)*(?:\(\))?")


TYPE = re.compile(r"(?:\b(?:struct|class|using) |^)([A-Z]\w*)", re.MULTILINE)


def test_classes_and_functions_that_are_named_exist() -> None:
    problems = []
    pages = [(ROOT / "docs" / name).read_text() for name in ("metrics.md", "gateway.md")]
    metrics = set(re.findall(r"quire_gateway_\w+", pages[1]))  # tested where they are
    metrics |= set(WORD.findall(pages[0]))
    types = {*members(), *(name for text in sources().values() for name in TYPE.findall(text))}
    known = names() | metrics | set(FOREIGN_NAMES.split())
    for line in reference_lines():
        drawn = re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", line.text) if line.kind == "text" else []  # in a diagram
        for span in [*line.spans, *drawn]:
            if not IDENTIFIER.fullmatch(span) or ("." in span and exists(span)):
                continue
            parts = re.split(r"\.|::", span.removesuffix("()").removeprefix("~"))
            if len(parts) > 1 and parts[-2] in members():
                missing = [] if parts[-1] in members()[parts[-2]] else [span]
            else:
                called = span.endswith("()") or "::" in span
                missing = [part for part in parts if (called or _looks_like_code(part)) and part not in known]
                missing += [part for part in parts if re.fullmatch(r"[A-Z][a-z]+", part) and part not in types]
            problems += [f"{line}: `{name}` is nowhere in the code" for name in missing]
    fail_if(problems)


def _looks_like_code(name: str) -> bool:
    return "_" in name.strip("_") or name.startswith("_") or bool(re.search(r"[a-z][A-Z]", name))


def test_the_glossary_names_the_file_of_a_class() -> None:
    problems = []
    for line in lines_of(GLOSSARY):
        cells = line.text.strip(" |").split(" | ") if line.kind == "table" else [""]
        spans = re.findall(r"`([^`]+)`", cells[0] + cells[-1])
        files = [path for path in spans if path.endswith(".py")]
        for name in members().keys() & set(spans) if files else ():
            texts = [sources().get(f"src/quire/{path}", "") for path in files]
            if not any(re.search(rf"^class {name}\b", text, re.MULTILINE) for text in texts):
                problems.append(f"{line}: `{name}` is not in {', '.join(files)}")
    fail_if(problems)


def test_links_lead_somewhere() -> None:
    problems = []
    for path in [*REFERENCE, *HISTORY]:
        for line in lines_of(path):
            if line.fenced:
                continue
            for target in re.findall(r"\]\(([^)\s]+)\)", line.text):
                if re.match(r"[a-z]+:", target):
                    continue
                file, _, anchor = target.partition("#")
                place = (path.parent / file).resolve() if file else path
                if not place.exists():
                    problems.append(f"{line}: the link {target} leads nowhere")
                elif anchor and anchor not in _anchors(place):
                    problems.append(f"{line}: {place.name} has no heading #{anchor}")
    fail_if(problems)


@cache
def _anchors(path: Path) -> set[str]:
    titles = [line.text.lstrip("# ").lower() for line in lines_of(path) if line.kind == "heading"]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_prose_is_wrapped() -> None:
    problems = []
    for path in [*REFERENCE, *HISTORY]:
        for line in lines_of(path):
            if line.kind in ("prose", "heading") and len(line.text) > MAX_COLUMNS:
                problems.append(f"{line}: {len(line.text)} columns, and prose has at most {MAX_COLUMNS}")
    fail_if(problems)


RULE_OF_TABLE = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")


def test_tables_have_a_line_for_each_row() -> None:
    """As many cells in each row as the header has, and a table that was wrapped into prose is none."""
    problems = []
    for path in [*REFERENCE, *HISTORY]:
        lines = lines_of(path)
        columns: int | None = None
        for header, line in zip([None, *lines], lines, strict=False):
            text = line.text.strip()
            is_rule = RULE_OF_TABLE.fullmatch(text) is not None
            if not line.fenced and "|---" in re.sub(r"`[^`]*`", "", text) and not is_rule:
                problems.append(f"{line}: the rule under a table's header is not a line of its own")
            elif is_rule and (header is None or _num_cells(header.text) != _num_cells(text)):
                problems.append(f"{line}: the header above it has another number of columns")
            columns = _num_cells(text) if is_rule else columns if line.kind == "table" else None
            if columns is not None and _num_cells(text) != columns:
                problems.append(f"{line}: {_num_cells(text)} columns in a table of {columns}")
    fail_if(problems)


def _num_cells(row: str) -> int:
    return re.sub(r"\\\||`[^`]*`", "", row).count("|") - 1


def retired_words() -> dict[str, str]:
    """Word -> what to say instead, from the last table of the glossary."""
    text = GLOSSARY.read_text().partition("## Retired words")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return {word: say for words, say in rows for word in re.findall(r"`([^`]+)`", words)}


def test_retired_words_stay_retired() -> None:
    retired = retired_words()
    assert len(retired) > 20, "the glossary has no table of retired words"
    any_word = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, retired))})(?![\w-])", re.IGNORECASE)
    honest = re.compile("|".join(HONEST), re.IGNORECASE)
    problems = []
    for line in reference_lines():
        if line.path == GLOSSARY and line.kind == "table":
            continue
        text = honest.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line.text))
        problems += [f"{line}: say {retired[word.lower()]}, not `{word}`" for word in any_word.findall(text)]
    fail_if(problems)
