"""Regular expressions, made at random of what is read as an automaton."""

from hypothesis import strategies as st

ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "é",
        "語",
        ".",
        r"\d",
        r"\w",
        r"\S",
        r"\.",
        r"\x62",
        r"\u00e9",
        "[ab]",
        "[^a]",
        r"[\d-]",
        "[a-c1]",
        "[-a]",
    ]
)
TIMES = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0}", "*?", "{0,2}?"])


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("({})".format),
        st.tuples(inner, TIMES).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


EXPRESSIONS = st.recursive(ATOMS, grouped, max_leaves=8)
