"""The page's modules that know nothing of the page: run where they will run, in a browser."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from page.browser import Browser
from server.running import running


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Browser]:
    with running() as server:
        chromium.open(f"{server.url}/")  # under its policy
        yield chromium
        chromium.close()


def run(page: Browser, module: str, expression: str, *arguments: object) -> Any:
    """`expression` is a function of the module and the arguments."""
    given = ", ".join(["m", *map(json.dumps, arguments)])
    return page.js(f"import('/page/js/{module}').then(m => ({expression})({given}))")


def parse(page: Browser, text: str) -> Any:
    without = (
        "(m, text) => JSON.parse(JSON.stringify(m.parse(text), (key, value) => key === 'raw' ? undefined : value))"
    )
    return run(page, "markdown.js", without, text)


def inline(page: Browser, text: str) -> Any:
    return run(page, "inline.js", "(m, text) => m.parseInline(text)", text)


def test_blocks(page: Browser) -> None:
    assert parse(page, "# Title ##\n\ntext\ngoes on") == [
        {"type": "heading", "level": 1, "children": ["Title"]},
        {"type": "paragraph", "children": ["text", "\n", "goes on"]},
    ]
    assert parse(page, "```py\nx = 1\n\n# no title\n```\nafter")[0] == {
        "type": "code",
        "language": "py",
        "text": "x = 1\n\n# no title",
    }
    assert parse(page, "text\n```\nstill being writ")[1] == {
        "type": "code",
        "language": "",
        "text": "still being writ",
        "open": True,
    }
    assert [block["type"] for block in parse(page, "a\n\n---\n> q\n\n***\n")] == ["paragraph", "rule", "quote", "rule"]


def test_lists(page: Browser) -> None:
    [outer] = parse(page, "- a\n  - b\n    - c\n- d")
    assert not outer["ordered"] and not outer["loose"] and len(outer["items"]) == 2
    assert outer["items"][0][1]["items"][0][1]["items"][0][0]["children"] == ["c"]
    [ordered] = parse(page, "3. three\n\n   more of it\n4. four")
    assert ordered["ordered"] and ordered["start"] == 3 and ordered["loose"]
    assert [block["type"] for block in ordered["items"][0]] == ["paragraph", "paragraph"]
    assert [block["type"] for block in parse(page, "- a\n\n1. b")] == ["list", "list"]
    [with_code] = parse(page, "1. Run:\n   ```sh\n   make\n   ```\n2. Done")
    assert with_code["items"][0][1] == {"type": "code", "language": "sh", "text": "make"}


def test_tables(page: Browser) -> None:
    [table] = parse(page, "| a | b \\| c |\n|:-:|--:|\n| *1* |\n| 2 | 3 | 4 |")
    assert table["align"] == ["center", "end"] and table["head"] == [["a"], ["b | c"]]
    assert table["rows"] == [[[{"type": "em", "children": ["1"]}], []], [["2"], ["3"]]]
    assert parse(page, "a | b\nno divider")[0]["type"] == "paragraph"


def test_inlines(page: Browser) -> None:
    assert inline(page, "**a *b* c** ~~d~~ `e`") == [
        {"type": "strong", "children": ["a ", {"type": "em", "children": ["b"]}, " c"]},
        " ",
        {"type": "strike", "children": ["d"]},
        " ",
        {"type": "code", "text": "e"},
    ]
    assert "".join(inline(page, "snake_case_name and 2 * 3 * 4 and **open")) == (
        "snake_case_name and 2 * 3 * 4 and **open"
    )
    assert inline(page, "`` a`b ``")[0] == {"type": "code", "text": "a`b"}
    assert inline(page, "a\\*b\\*") == ["a*b*"]
    assert inline(page, "line  \nnext")[1] == {"type": "break"}


def test_links(page: Browser) -> None:
    link = {"type": "link", "href": "https://a.b/c_(d)", "children": ["x"]}
    assert inline(page, '[x](https://a.b/c_(d) "title")') == [link]
    assert inline(page, "see https://a.b/c, or (https://d.e)")[1]["href"] == "https://a.b/c"
    assert inline(page, "see https://a.b/c, or (https://d.e)")[3]["href"] == "https://d.e"
    assert inline(page, "![image](https://a.b/c.png)")[0]["type"] == "link", "nothing is fetched from elsewhere"
    for bad in (
        "[x](javascript:alert(1))",
        "[x](data:text/html,x)",
        "[x]( vbscript:x)",
        "<javascript:x>",
        "[x](//a.b)",
    ):
        assert all(isinstance(part, str) for part in inline(page, bad)), bad


@pytest.mark.parametrize(
    "text", ["*", "_a", "[", "![", "<", "`", "**a", "[a](", "[a](http://", "> ", "- ", "#", "~~", "\\", "`a``", "a*b"]
)
def test_a_hostile_text_takes_no_longer_than_a_kind_one(page: Browser, text: str) -> None:
    timed = "(m, t) => { const begin = performance.now(); m.parse(t.repeat(20000)); return performance.now() - begin }"
    assert run(page, "markdown.js", timed, text) < 1500


def test_events_that_come_in_pieces(page: Browser) -> None:
    pieces = ['data: {"a', '": 1}\n', "\ndata: x\ndata: y\r\n\r\n: comment\n\nevent: z\n", "data:[DONE]\n\n"]
    fed = "(m, pieces) => { const p = new m.EventParser(); return pieces.map(piece => p.push(piece)) }"
    assert run(page, "sse.js", fed, pieces) == [[], [], ['{"a": 1}', "x\ny"], ["[DONE]"]]


def test_conversations_are_kept(page: Browser) -> None:
    kept = run(
        page,
        "store.js",
        """m => {
          const items = new Map();
          const storage = {
            getItem: key => items.get(key) ?? null,
            setItem: (key, value) => items.set(key, value),
            removeItem: key => items.delete(key),
          };
          let time = 0;
          const store = new m.Store(storage, () => ++time);
          const [a, b] = [store.create(), store.create({system: "Be brief."})];
          a.messages.push({role: "user", content: "  A question\\nof two lines "});
          b.messages.push({role: "user", content: "word ".repeat(40)});
          store.save(a);
          store.save(b);
          store.rename(a.id, "Named");
          const named = store.load(a.id);
          store.save(named);
          const listed = store.list();
          store.rename(a.id, "");
          store.delete(b.id);
          return {listed, renamed: store.list()[0].title, deleted: store.load(b.id), left: items.size,
                  text: m.asMarkdown({...named, model: "smol", system: "x"})};
        }""",
    )
    assert kept["listed"][0]["title"] == "Named", "the last saved is first, and its name stays"
    assert kept["listed"][1]["title"].endswith("word…") and len(kept["listed"][1]["title"]) <= 61
    assert kept["renamed"] == "A question" and kept["deleted"] is None and kept["left"] == 2
    assert kept["text"].startswith("# Named\n\n> x\n\n**You**\n\n")


def test_an_answer_is_measured(page: Browser) -> None:
    answered = run(
        page,
        "chat/answer.js",
        """m => {
          let time = 0;
          const answer = new m.Answer({}, () => time);
          const chunk = (delta, more) => answer.add({id: "x", choices: [{delta, ...more}]});
          chunk({role: "assistant", content: ""});
          time = 250; chunk({reasoning_content: "Hm."});
          time = 350; chunk({content: "Yes"});
          time = 450; chunk({content: "."}, {finish_reason: "length"});
          const early = answer.stats.tokens;
          answer.add({id: "x", choices: [], usage: {prompt_tokens: 20, completion_tokens: 5,
                                                   prompt_tokens_details: {cached_tokens: 16},
                                                   completion_tokens_details: {accepted_prediction_tokens: 2,
                                                                               rejected_prediction_tokens: 1}}});
          return {early, content: answer.content, reasoning: answer.reasoning, stats: answer.stats,
                  said: m.describeStats(answer.stats, answer.finish)};
        }""",
    )
    assert answered["early"] == 3 and answered["content"] == "Yes." and answered["reasoning"] == "Hm."
    drafts = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}
    assert answered["stats"] == {"tokens": 5, "ttft": 250, "rate": 20, "prompt": 20, "cached": 16, "drafts": drafts}
    assert answered["said"] == (
        "5 tokens · first after 250 ms · 20 tokens/s · prompt 20, 16 of it cached · 2 of 3 draft tokens accepted · "
        "ended at the token limit"
    )


def test_what_is_asked(page: Browser) -> None:
    chat = {
        "system": "Be brief.",
        "params": {"temperature": 0, "stop": ["\n"]},
        "messages": [{"role": "user", "content": "Hi", "stats": {"tokens": 1}}],
    }
    assert run(page, "chat/parameters.js", "(m, chat) => m.requestFor(chat, 'smol')", chat) == {
        "model": "smol",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0,
        "stop": ["\n"],
    }
    read = "(m, texts) => texts.map(t => m.readNumber(t, {min: 1, max: 9, whole: true}) ?? 'empty').map(String)"
    assert run(page, "chat/parameters.js", read, ["3", " ", "0", "10", "2.5", "x"]) == ["3", "empty", *["NaN"] * 4]


def test_models_that_can_be_talked_to(page: Browser) -> None:
    models = [
        {
            "id": "a",
            "parent": None,
            "max_model_len": 2048,
            "task": "generate",
            "default_sampling_params": {"top_p": 0.9},
        },
        {"id": "b", "parent": "a", "max_model_len": 2048, "task": "generate"},
        {"id": "c", "parent": None, "max_model_len": 512, "task": "embed"},
        {"id": "d", "parent": None, "max_model_len": None, "task": None},
        {"id": "e", "parent": None, "max_model_len": 512, "task": "score"},
    ]
    offered = run(page, "models.js", "(m, models) => m.offered(models).map(({text}) => text)", models)
    assert offered == ["a", "b (adapter of a)", "d (loads when asked)"]
    advice = run(page, "models.js", "(m, models) => m.offered(models).map(({advice}) => advice)", models)
    assert advice == [{"top_p": 0.9}, {}, {}]


def view(name: str, state: str, computed: int, known: int) -> dict[str, Any]:
    return {
        "request_id": name,
        "sample": 0,
        "state": state,
        "num_prompt": 40,
        "num_known": known,
        "num_computed": computed,
        "num_cached": 16,
        "num_blocks": 3,
        "arrival": 10.0,
    }


def event(now: float, generation: int, sequences: list[Any], steps: list[Any], finished: list[Any]) -> dict[str, Any]:
    engine = {"now": now, "sequences": sequences, "steps": steps}
    return {"now": now, "tokens": {"generation": generation}, "finished": finished, "engine": engine}


def step(number: int, ended: float, decoding: int, chunks: list[tuple[str, int, int]], preempted: list[str]) -> Any:
    listed = [{"request_id": name, "sample": 0, "start": start, "count": count} for name, start, count in chunks]
    return {
        "step": number,
        "ended": ended,
        "seconds": 0.5,
        "decoding": decoding,
        "chunks": listed,
        "preempted": preempted,
    }


def test_the_life_of_a_request(page: Browser) -> None:
    record = {
        "id": "a",
        "finish_reason": "stop",
        "num_prompt_tokens": 40,
        "num_cached_tokens": 16,
        "num_output_tokens": 7,
        "drafts": {"num_tokens": 6, "lengths": [1, 0, 2]},
        "arrival": 10.0,
        "first_token": 12.0,
        "finished": 20.0,
    }
    unseen = {**record, "id": "b", "arrival": 5.0, "first_token": 6.0, "finished": 8.0}
    events = [
        event(10.5, 0, [view("a", "waiting", 0, 40)], [], [unseen]),
        event(
            13.0,
            2,
            [view("a", "running", 42, 43)],
            [step(1, 11.5, 0, [("a", 16, 10)], []), step(2, 12.0, 0, [("a", 26, 14)], []), step(3, 13.0, 1, [], [])],
            [],
        ),
        event(15.0, 3, [view("a", "preempted", 0, 44)], [step(4, 14.5, 0, [], ["a"])], []),
        event(17.0, 3, [view("a", "running", 44, 44)], [step(5, 16.5, 0, [("a", 32, 12)], [])], []),
        event(20.5, 7, [], [], [record]),
    ]
    lived = run(
        page,
        "engine/history.js",
        """(m, events) => {
          const history = new m.History();
          for (const event of events) history.add(event);
          const spans = id => history.requests.get(id).spans.map(({kind, from, to}) => [kind, from, to]);
          return {a: spans("a"), b: spans("b"), state: history.requests.get("a").state,
                  words: m.describe(history.requests.get("a"), 21, s => `${s} s`)};
        }""",
        events,
    )
    assert lived["b"] == [["unseen", 5, 6], ["decode", 6, 8]]
    assert lived["a"] == [
        ["queued", 10, 11],
        ["prefill", 11, 11.5],
        ["prefill", 11.5, 12],
        ["decode", 12, 14],
        ["preempted", 14, 16],
        ["prefill", 16, 16.5],
        ["decode", 16.5, 20],
    ]
    assert lived["state"] == "stop"
    assert lived["words"] == (
        "queued 1 s · 16 prompt tokens found in the cache · prefill 1.5 s in 3 chunks of 10 + 14 + 12 tokens"
        " · preempted for 2 s · 7 tokens sampled in 5.5 s · 4 of 6 draft tokens accepted · ended by stop"
    )


def tokens(page: Browser, text: str, language: str) -> Any:
    return run(
        page, "code.js", "(m, t, l) => m.tokens(t, l).map(({kind, text}) => kind ? [kind, text] : text)", text, language
    )


def test_programs_in_colour(page: Browser) -> None:
    assert tokens(page, 'def f(x):  # "no"\n    return "a\\"b" + 0x1F', "python") == [
        ["keyword", "def"],
        " f(x):  ",
        ["comment", '# "no"'],
        "\n    ",
        ["keyword", "return"],
        " ",
        ["string", '"a\\"b"'],
        " + ",
        ["number", "0x1F"],
    ]
    assert ["string", '"""a\n\'b'] in tokens(page, 'x = """a\n\'b', "py"), "while it is being written"
    assert ["string", "`a ${b}\n`"] in tokens(page, "f(`a ${b}\n`)", "js")
    assert tokens(page, "echo ${#a} # b", "sh")[-1] == ["comment", "# b"]
    assert tokens(page, "fn f<'a>(x: &'a str)", "rust")[0] == ["keyword", "fn"]
    assert ["keyword", "SELECT"] in tokens(page, "SELECT 1 -- x", "sql")
    assert tokens(page, "if it is not a program", "") == ["if it is not a program"]
    for text, language in (('"\\', "js"), ("'\\'", "python"), ("/*", "c"), ('"""', "python"), ("a1 ", "go")):
        timed = (
            "(m, t, l) => { const begin = performance.now(); const all = m.tokens(t, l);"
            " return all.map(p => p.text).join('') === t && performance.now() - begin }"
        )
        took = run(page, "code.js", timed, text * (49_000 // len(text)), language)
        assert took is not False and took < 1500, (text, language)


def test_what_is_drawn_of_a_pool(page: Browser) -> None:
    drawn = "(m, last, all, before) => m.numDrawn(Array.from({length: all}, (_, i) => Number(i <= last)), before)"
    assert run(page, "engine/blocks.js", drawn, -1, 4000, 0) == 256
    assert run(page, "engine/blocks.js", drawn, 300, 4000, 0) == 512
    assert run(page, "engine/blocks.js", drawn, 3, 4000, 512) == 512, "it does not shrink while somebody looks"
    assert run(page, "engine/blocks.js", drawn, 3999, 4000, 0) == 4000
    laid = "(m, count, width) => m.layout(count, width)"
    for count, width in ((0, 360), (1, 1200), (256, 360), (11_650, 1200), (100_000, 360), (1_000_000, 1200)):
        place = run(page, "engine/blocks.js", laid, count, width)
        assert place["rows"] * place["cell"] <= 320 and place["columns"] * place["cell"] <= width
        assert place["rows"] * place["columns"] * place["each"] >= count
        assert place["each"] == 1 or count > 10_000


def test_what_the_queue_waits_for(page: Browser) -> None:
    lacking = """(m, running, held) => m.lacking({stats: {running, num_blocks: 10, held_blocks: held}, max_num_seqs: 4,
                                             block_size: 16}, {num_known: 40})"""
    assert run(page, "engine/queue.js", lacking, 4, 0) == "a row"
    assert run(page, "engine/queue.js", lacking, 3, 8) == "blocks"
    assert run(page, "engine/queue.js", lacking, 3, 7) == "the next step"


PIECES = [
    "<script>hacked=1</script>",
    "<img src=x onerror=hacked=1>",
    "<svg/onload=hacked=1>",
    "<a href='javascript:hacked=1'>",
    "[x](javascript:hacked=1)",
    "[x](https://a.b 'onclick=hacked=1')",
    '![x](https://a.b/" onerror="hacked=1)',
    "<https://a.b>",
    "<javascript:hacked=1>",
    "https://a.b/?<script>",
    "[a [b](https://c.d)](https://e.f)",
    "```html\n",
    "```\n",
    "~~~",
    "|a|b|\n|-|-|\n",
    "\n\n",
    "\n",
    "\n- ",
    "\n1. ",
    "\n> ",
    "\n    ",
    "# ",
    "**",
    "*",
    "_",
    "~~",
    "`",
    "\\",
    "&lt;b&gt;",
    "&#106;avascript:",
    "\u0000",
    "\u202e",
    "word ",
    "]]>",
    "--->",
    "<!--",
    "|",
    "](",
    "![",
    "\t",
]

FUZZ = """async (m, pieces, seed, rounds) => {
  const random = () => (seed = (seed * 1103515245 + 12345) % 2147483648) / 2147483648;
  const tags = new Set(`P H3 H4 H5 H6 UL OL LI SPAN BLOCKQUOTE HR BR A CODE PRE FIGURE FIGCAPTION BUTTON svg path DIV
    TABLE THEAD TBODY TR TH TD STRONG EM S`.split(/\\s+/));
  const names = new Set(`class href target rel start type aria-label aria-hidden tabindex role viewBox d`.split(' '));
  let growing = null;
  for (let round = 0; round < rounds; round++) {
    const text = Array.from({length: 3 + random() * 25}, () => pieces[Math.floor(random() * pieces.length)]).join('');
    const whole = new m.Prose();
    whole.set(text);
    document.documentElement.append(whole.element);
    for (const element of whole.element.querySelectorAll('*')) {
      if (!tags.has(element.tagName)) return ['tag', element.tagName, text];
      for (const {name, value} of element.attributes) {
        if (!names.has(name)) return ['attribute', name, text];
        if (name === 'href' && !/^(https?:|mailto:)/.test(element.href)) return ['address', value, text];
      }
    }
    growing = new m.Prose();
    for (let end = 0; end < text.length; end += 1 + Math.floor(random() * 9)) growing.set(text.slice(0, end));
    growing.set(text);
    if (growing.element.innerHTML !== whole.element.innerHTML) return ['grown differently', text];
    whole.element.remove();
  }
  return 'hacked' in window ? ['hacked'] : [];
}"""


def test_no_text_becomes_anything_but_prose(page: Browser) -> None:
    """Whatever is made of markup, and however it comes: known elements, known attributes, links to the web only; and a
    text that grew is shown as one that came at once."""
    for seed in (1, 2, 3):
        assert run(page, "prose.js", FUZZ, PIECES, seed, 150) == []
    assert all(url.startswith("http://127.0.0.1") for url in page.requested()) and page.complaints() == []


def test_versions_of_a_conversation(page: Browser) -> None:
    told = run(
        page,
        "chat/versions.js",
        """m => {
          const told = [], roles = ["user", "assistant", "user", "assistant"];
          const messages = ["q", "a", "q2", "a2"].map((content, at) => ({role: roles[at], content}));
          const say = (...contents) => contents.forEach((content) => messages.push({content}));
          const tell = () => told.push(messages.map(({content}) => content).join(" "));
          let versions = m.setAside(messages, 1);                      // the first answer again
          messages.push({role: "assistant", content: "b", versions}); tell();
          versions = m.setAside(messages, 0);                          // the question in other words
          messages.push({role: "user", content: "p", versions}); say("c"); tell();
          m.turn(messages, 0, -1); tell();
          m.turn(messages, 1, -1); tell();
          told.push(m.turn(messages, 1, -1));
          told.push(m.turn(messages, 0, 1) && m.turn(messages, 0, 1)); tell();
          messages.push({role: "assistant", content: ""});             // one that never came
          versions = m.setAside(messages, 2);
          const [first] = messages[0].versions.tails;
          return [...told, versions.tails.length, first.map(({content}) => content)];
        }""",
    )
    assert told[:4] == ["q b", "p c", "q b", "q a q2 a2"]
    assert told[4:] == [False, False, "p c", 1, ["q", "a", "q2", "a2"]]


def test_the_figures_tell_what_tiers_gave_what_they_hold_and_what_failed(page: Browser) -> None:
    latency = {"p50": 1, "p90": 1, "p99": 1, "count": 0}
    event = {"latency": {"first_token": latency, "next_token": latency}, "memory": {"cache": 640, "weights": 1}}
    tiers = {
        "host": {"hits": 48, "seconds_saved": 2, "stored_bytes": 0, "errors": 0},
        "disk": {"hits": 1024, "seconds_saved": 3, "stored_bytes": 24 * 2**20, "errors": 1},
    }
    stats = {"num_blocks": 64, "held_blocks": 1, "prefix_hits": 1072, "prefix_queries": 2144, "tiers": tiers}
    stats |= dict.fromkeys(["running", "waiting", "preemptions", "held_slots", "used_slots"], 0)
    history = {"rates": [{"generation": 0, "prefill": 0}], "snapshot": {"stats": stats, "max_num_seqs": 8}}
    shown = run(
        page,
        "engine/figures.js",
        "(m, event, history) => { const f = new m.Figures(); f.show(event, history); return f.hits.more.textContent }",
        event,
        history,
    )
    assert "48 from host, 2.00 s saved, 0 B kept" in shown
    assert "1,024 from disk, 3.00 s saved, 25.2 MB kept, 1 error" in shown and shown.count("error") == 1
