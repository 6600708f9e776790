from hypothesis import example, given
from hypothesis import strategies as st

from quire.text.stop import StopStrings


def whole(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The specification: the match that ends first, and of those the longest."""
    matches = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    end, _, stop = min(matches)
    return text[: end if include else end - len(stop)], stop


def in_pieces(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    search, shown = StopStrings(stops, include), ""
    for piece in pieces:
        text, stop = search.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + search.flush(), None


short_texts = st.text("abc", max_size=6)


@given(st.lists(short_texts, max_size=12), st.lists(st.text("abc", min_size=1, max_size=6), max_size=4), st.booleans())
@example(["aab", "aab", "c"], ["aabaabc"], False)
@example(["aabaa", "baabc"], ["aabaabc"], False)  # falls back into the middle of itself
@example(["abcd"], ["abcd", "bc"], False)
def test_the_result_does_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    assert in_pieces(pieces, stops, include) == whole("".join(pieces), stops, include)


@given(short_texts, st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    shown, stop = StopStrings(stops).push(text)
    if stop is None:
        held = text[len(shown) :]
        longest = max(
            (text[at:] for at in range(len(text) + 1) if any(stop.startswith(text[at:]) for stop in stops)), key=len
        )
        assert held == longest


def test_a_long_stop_string_costs_only_the_characters_that_matched() -> None:
    search = StopStrings(["a" * 10_000_000 + "b"])
    assert search.push("xaaac") == ("xaaac", None)
    assert search.push("aa") == ("", None) and search.flush() == "aa"
