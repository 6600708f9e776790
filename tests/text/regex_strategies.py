"""Random regexes of the syntax that has an automaton."""

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
QUANTIFIERS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0}", "*?", "{0,2}?"])


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("({})".format),
        st.tuples(inner, QUANTIFIERS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


REGEXES = st.recursive(ATOMS, combine, max_leaves=8)
