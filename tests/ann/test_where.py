"""Filters as text: the parser, and evaluation against a plain evaluator of one row by SQL's three values."""

import math
import operator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memhier.ann.zoom.filters.where import (
    And,
    Comparison,
    Expression,
    IsNull,
    Like,
    Membership,
    Not,
    Or,
    Pair,
    evaluate,
    parse,
)

COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip

# Neighbours of what float64 and int64 can hold, so that rounding on either side shows.
INTEGERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([s * (2**e + d) for s in (1, -1) for e in (53, 62, 63) for d in (-1, 0, 1)]),
    st.integers(-(2**70), 2**70),
    st.just(10**400),
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, 2.5, -2.5, 2.0**53, 2.0**63, -(2.0**63), 1.7e308, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
)
WORDS = st.one_of(
    st.sampled_from(["", "a", "ab", "b", "it's", '"', "\x00", "a\x00", "é", "日本", "\U0001f600", "\uffff"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
)


def trees(leaf):
    def deeper(inner):
        several = st.lists(inner, min_size=2, max_size=3).map(tuple)
        return st.one_of(inner.map(Not), several.map(And), several.map(Or))

    return st.recursive(leaf, deeper, max_leaves=6)


def leaves_of(name, values, operators=tuple(COMPARE)):
    return st.one_of(
        st.builds(Comparison, st.just(name), st.sampled_from(operators), values),
        st.builds(Membership, st.just(name), st.lists(values, min_size=1, max_size=3).map(tuple)),
        st.just(IsNull(name)),
    )


NUMBERS = st.one_of(INTEGERS, FLOATS)
MARKS = st.one_of(
    st.sampled_from(["%", "%", "_", "\\%", "\\_", "\\\\", "a", "b", "é", "\uffff", "\U0010ffff", "\n"]),
    WORDS.map(lambda word: word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")),
)
PATTERNS = st.lists(MARKS, max_size=6).map("".join)
PAIRS = st.one_of(
    st.builds(Pair, st.sampled_from("ijf"), st.sampled_from([*COMPARE]), st.sampled_from("ijf")),
    st.builds(Pair, st.sampled_from("st"), st.sampled_from([*COMPARE]), st.sampled_from("st")),
    st.builds(Pair, st.sampled_from("bc"), st.sampled_from(["==", "!="]), st.sampled_from("bc")),
)
LEAVES = st.one_of(
    PAIRS,
    st.builds(Like, st.just("s"), PATTERNS),
    leaves_of("i", NUMBERS),
    leaves_of("f", NUMBERS),
    leaves_of("s", WORDS),
    leaves_of("b", st.booleans(), ("==", "!=")),
)
TREES = trees(LEAVES)


def same(left: Expression, right: Expression) -> bool:
    # == takes 1, 1.0 and true for the same.
    return repr(left) == repr(right)


def truth(expression, row):
    """Return True, False or None for unknown."""
    match expression:
        case Not(operand):
            value = truth(operand, row)
            return None if value is None else not value
        case And(operands):
            values = [truth(operand, row) for operand in operands]
            return False if False in values else None if None in values else True
        case Or(operands):
            values = [truth(operand, row) for operand in operands]
            return True if True in values else None if None in values else False
        case IsNull(name):
            return row[name] is None
        case Comparison(name, sign, value):
            return None if row[name] is None else COMPARE[sign](row[name], value)
        case Membership(name, values):
            return None if row[name] is None else row[name] in values
        case Pair(name, sign, other):
            return None if row[name] is None or row[other] is None else COMPARE[sign](row[name], row[other])
        case Like(name, pattern):
            return None if row[name] is None else like(pattern, row[name])


def like(pattern, text):
    """Return whether a text is of a pattern, by its definition."""
    if not pattern:
        return not text
    if pattern[0] == "%":
        return any(like(pattern[1:], text[start:]) for start in range(len(text) + 1))
    if pattern[0] == "\\":
        return text[:1] == pattern[1] and like(pattern[2:], text[1:])
    return bool(text) and pattern[0] in ("_", text[0]) and like(pattern[1:], text[1:])


INT64 = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63 - 2, -(2**63), 2**62 + 1]),
    st.integers(-(2**63), 2**63 - 1),
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.none() | INT64,
            "j": st.none() | INT64,
            "f": st.none() | FLOATS | st.sampled_from([math.inf, -math.inf, 2.0**53 + 2]),
            "s": st.none() | WORDS,
            "t": st.none() | WORDS,
            "b": st.none() | st.booleans(),
            "c": st.none() | st.booleans(),
        }
    ),
    max_size=9,
)


def columns_of(rows):
    def masked(name, dtype):
        nulls = [row.get(name) is None for row in rows]
        return np.ma.MaskedArray(np.array([row.get(name) or 0 for row in rows], dtype), nulls)

    columns = {name: np.fromiter((row.get(name) for row in rows), object, len(rows)) for name in "st"}
    columns |= {name: masked(name, np.int64) for name in "ij"} | {name: masked(name, np.bool_) for name in "bc"}
    return columns | {"f": np.array([math.nan if row["f"] is None else row["f"] for row in rows], np.float64)}


@settings(max_examples=200, deadline=None)
@given(TREES)
@example(Not(Not(Comparison("s", "==", "it''s \" '"))))
@example(Comparison("f", "<", -0.0))
@example(And((And((IsNull("a"), IsNull("b"))), IsNull("c"))))
def test_a_tree_written_as_text_parses_to_the_same_tree(tree):
    assert same(parse(str(tree)), tree)


@settings(max_examples=300, deadline=None)
@given(TREES, ROWS)
@example(Comparison("i", "==", 2.0**53), [{"i": 2**53 + 1, "f": None, "s": None, "b": None}])
@example(Comparison("f", ">=", 2**53 + 1), [{"i": None, "f": 2.0**53, "s": None, "b": None}])
@example(Comparison("i", "<", 2.0**63), [{"i": 2**63 - 1, "f": None, "s": None, "b": None}])
@example(Comparison("f", "<", 10**400), [{"i": None, "f": math.inf, "s": None, "b": None}])
@example(Not(Membership("s", ("a",))), [{"i": None, "f": None, "s": None, "b": None}])
@example(Not(And((IsNull("s"), Comparison("f", "!=", 1)))), [{"i": None, "f": None, "s": "", "b": None}])
def test_evaluation_is_that_of_each_row_on_its_own(tree, rows):
    found = evaluate(tree, columns_of(rows))
    assert found.dtype == np.bool_
    assert found.tolist() == [truth(tree, row) is True for row in rows]


EDGES = [s * (2**e + d) for s in (1, -1) for e in (0, 1, 53, 62, 63) for d in (-1, 0, 1)]
NUMBER_EDGES = [*EDGES, *map(float, EDGES), 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -0.0, 5e-324, 1.7e308, 10**400, -(10**400)]


def test_numbers_compare_exactly_at_every_edge():
    integers = [value for value in EDGES if -(2**63) <= value < 2**63]
    floats = [*map(float, EDGES), 2.0**53 + 2, 0.5, -1.5, math.inf, -math.inf]
    for values in (integers, floats):
        columns = {"x": np.array(values)}
        for value in NUMBER_EDGES:
            for sign, compare in COMPARE.items():
                found = evaluate(Comparison("x", sign, value), columns).tolist()
                assert found == [compare(entry, value) for entry in values], (sign, value)
            found = evaluate(Membership("x", (value, 1)), columns).tolist()
            assert found == [entry in (value, 1) for entry in values], value


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("price < 10 and lang == 'en'", And((Comparison("price", "<", 10), Comparison("lang", "==", "en")))),
        ("a=1", Comparison("a", "==", 1)),
        ("a<-5", Comparison("a", "<", -5)),
        ("a >= + 1.5e-3", Comparison("a", ">=", 1.5e-3)),
        ("a == 1e3", Comparison("a", "==", 1000.0)),
        ("a == .5 or a == 5.", Or((Comparison("a", "==", 0.5), Comparison("a", "==", 5.0)))),
        ("10 > a", Comparison("a", "<", 10)),
        ("10 != a", Comparison("a", "!=", 10)),
        ("'x' <= a", Comparison("a", ">=", "x")),
        ("a != 'it''s'", Comparison("a", "!=", "it's")),
        ('a == "say ""so"" \'"', Comparison("a", "==", 'say "so" \'')),
        ("a == ''", Comparison("a", "==", "")),
        ("a in (1, 2.0, -3)", Membership("a", (1, 2.0, -3))),
        ("a NOT IN ('x')", Not(Membership("a", ("x",)))),
        ("a between 1 and 2 and b", And((And((Comparison("a", ">=", 1), Comparison("a", "<=", 2))), parse("b")))),
        ("a not between 1 and 2", Not(And((Comparison("a", ">=", 1), Comparison("a", "<=", 2))))),
        ("a LIKE 'x%'", Like("a", "x%")),
        ("a not like 'it''s\\%'", Not(Like("a", "it's\\%"))),
        ("like like 'like' and like", And((Like("like", "like"), parse("like")))),
        ("price < list_price", Pair("price", "<", "list_price")),
        ("a = b and c", And((Pair("a", "==", "b"), parse("c")))),
        ("not (a != b)", Not(Pair("a", "!=", "b"))),
        ("a between low and 5", And((Pair("a", ">=", "low"), Comparison("a", "<=", 5)))),
        ("a not between 1 and high", Not(And((Comparison("a", ">=", 1), Pair("a", "<=", "high"))))),
        ("tags contains brand", Pair("tags", "contains", "brand")),
        ("tags not contains any", Not(Pair("tags", "contains", "any"))),
        ("(tags contains all) and a", And((Pair("tags", "contains", "all"), parse("a")))),
        ("a is null", IsNull("a")),
        ("a Is Not Null", Not(IsNull("a"))),
        ("sold", Comparison("sold", "==", True)),
        ("not sold == TRUE", Not(Comparison("sold", "==", True))),
        ("a or b and not c", Or((parse("a"), And((parse("b"), Not(parse("c"))))))),
        ("(a or b) and c", And((Or((parse("a"), parse("b"))), parse("c")))),
        ("\n( ((a)) )\t", Comparison("a", "==", True)),
        ("android == 1 and inner == 2", And((Comparison("android", "==", 1), Comparison("inner", "==", 2)))),
        ("number == 'end' and text == '<'", And((Comparison("number", "==", "end"), Comparison("text", "==", "<")))),
        (f"a == {2**53 + 1}", Comparison("a", "==", 2**53 + 1)),
    ],
)
def test_forms(text, tree):
    assert same(parse(text), tree)


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 0, "an attribute's name, a value, 'not' or '('"),
        ("a <", 3, "a value (a number, 'text', true or false) at position 3, found the end"),
        ("a < )", 4, "found )"),
        ("a < b < c", 6, "'and', 'or' or the end"),
        ("a in (b)", 6, "a value"),
        ("a == null", 5, "'is null'"),
        ("a < 1 b", 6, "'and', 'or' or the end at position 6, found b"),
        ("1 < a < 3", 6, "'and', 'or' or the end"),
        ("a < 1 and", 9, "an attribute's name"),
        ("(a < 1", 6, "'and', 'or' or ')' at position 6"),
        ("a < 1)", 5, "found )"),
        ("a in 1", 5, "'('"),
        ("a in ()", 6, "a value"),
        ("a in (1 2)", 8, "',' or ')'"),
        ("a not 1", 6, "'in', 'between', 'like' or 'contains'"),
        ("a like 1", 7, "a pattern such as 'red%'"),
        ("a not like b", 11, "a pattern such as 'red%'"),
        ("a between 1 or 2", 12, "'and'"),
        ("a is 1", 5, "'null' or 'not null'"),
        ("a is not 1", 9, "'null'"),
        ("1 and a", 2, "a comparison"),
        ("1 < 2", 4, "an attribute's name"),
        ("a < - 'x'", 6, "a number"),
        ("a < 10x", 6, "a letter right after a number"),
        ("a < 1e999", 4, "beyond float64"),
        ("a == 'x", 5, "without its closing quote"),
        ("a == \"x'", 5, "without its closing quote"),
        ("a & b", 2, "unexpected '&'"),
        ("a == \u0661", 5, "unexpected"),
        ("é == 1", 0, "unexpected"),
        ("a == " + "1" * 5000, 5, "a number of 5000 characters"),
        ("a ==\n\n &", 7, "unexpected '&'"),
        ("(" * 10_000, 65, "nested more than 64 levels"),
        ("not " * 10_000 + "a", 260, "nested more than 64 levels"),
    ],
)
def test_mistakes_show_where_and_what_was_expected(text, position, expected):
    with pytest.raises(ValueError, match=r"^where: ") as caught:
        parse(text)
    message, shown, caret = str(caught.value).split("\n")
    assert expected in message
    assert f"position {position}" in message
    # The caret stands under what is at the position.
    assert caret.strip() == "^"
    column = caret.index("^")
    assert shown[column : column + 1].strip() == text[position : position + 1].strip()


def test_depth_and_length_have_limits_that_are_large_enough():
    assert parse("(" * 64 + "a" + ")" * 64) == parse("a")
    assert parse("not " * 64 + "a").names == ("a",)
    chain = parse(" and ".join(["a < 1"] * 10_000))
    assert len(chain.operands) == 10_000
    assert evaluate(chain, {"a": np.array([0, 1])}).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"262,145 characters, expected at most 262,144"):
        parse("a".ljust(262_145))
    assert parse("a".ljust(262_144)) == parse("a")
    for wrong in (None, 7, b"a < 1"):
        with pytest.raises(TypeError, match="where="):
            parse(wrong)


def test_names_are_sorted_and_once():
    assert parse("b < 1 or (a is null and not b in (2)) or c").names == ("a", "b", "c")


def test_unknown_attributes_are_refused_with_those_there_are():
    columns = {"price": np.zeros(2), "lang": np.array(["en", "de"])}
    with pytest.raises(ValueError, match=r"no attribute 'prise': did you mean 'price'\? expected one of lang, price"):
        evaluate(parse("lang == 'en' or prise < 3"), columns)
    with pytest.raises(ValueError, match="there are none"):
        evaluate(parse("price < 3"), {})
    with pytest.raises(ValueError, match=r"no attribute 'en': .*; text stands in quotes: lang == 'en'"):
        evaluate(parse("lang == en"), columns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s < 1", "attribute 's' is str, it cannot be compared with int"),
        ("s in ('a', 1.5)", "attribute 's' is str, it cannot be compared with float"),
        ("s == true", "attribute 's' is str, it cannot be compared with bool"),
        ("s", "attribute 's' is str, it cannot be compared with bool"),
        ("i == 'a'", "attribute 'i' is int64, it cannot be compared with str"),
        ("f == true", "attribute 'f' is float64, it cannot be compared with bool"),
        ("not (f < 1 and i == '1')", "attribute 'i' is int64"),
        ("b == 1", "attribute 'b' is bool, it cannot be compared with int"),
        ("b < true", "attribute 'b' is bool, which has no order"),
        ("i like '1%'", "attribute 'i' is int64; expected text for like"),
        ("s < i", "attribute 's' is str; it cannot be compared with attribute 'i', which is int64"),
        ("f == b", "attribute 'f' is float64; it cannot be compared with attribute 'b', which is bool"),
        ("b >= b", "attribute 'b' is bool, which has no order"),
    ],
)
def test_values_of_another_kind_are_refused(text, message):
    columns = {"i": np.zeros(1, int), "f": np.zeros(1), "s": np.array(["a"]), "b": np.array([True])}
    with pytest.raises(TypeError, match=message):
        evaluate(parse(text), columns)


def test_columns_of_any_layout_and_width():
    wide = np.arange(40).reshape(8, 5)
    columns = {"a": wide[::2, 3], "b": wide.astype(np.uint8)[::2, 1], "c": wide.astype(">f4")[::2, 0]}
    rows = [
        dict(zip("abc", values, strict=True)) for values in zip(*(c.tolist() for c in columns.values()), strict=True)
    ]
    tree = parse("a > 3 and b <= 21 and not c == 10")
    assert evaluate(tree, columns).tolist() == [truth(tree, row) is True for row in rows]
    with pytest.raises(ValueError, match="'b' has 3 values: expected 4"):
        evaluate(tree, {**columns, "b": np.zeros(3)})
    assert evaluate(parse("x < 3 or x == 'a' or not x"), {"x": np.array([None, None])}).tolist() == [False, False]
    assert evaluate(parse("x is null"), {"x": np.array([None, None])}).tolist() == [True, True]


@settings(max_examples=500, deadline=None)
@given(PATTERNS, st.lists(st.text("ab%_\\é\n\U0010ffff", max_size=8), max_size=9))
@example("%a%a%a%b", ["a" * 8])
@example("a%a", ["a", "aa", "aba"])
@example("\U0010ffff%", ["\U0010ffff", "\U0010ffffa", "z"])
def test_like_is_the_definition_of_patterns(pattern, texts):
    found = evaluate(Like("s", pattern), {"s": np.array([*texts, None], object)}) if texts else np.array([False])
    assert found.tolist() == [like(pattern, text) for text in texts] + [False]


def test_like_takes_no_time_that_grows_with_choices():
    """A matcher that tries all choices takes longer than the age of the universe here."""
    texts = np.array(["a" * 50_000, "a" * 50_000 + "b"])
    assert evaluate(Like("s", "%a" * 60 + "%b"), {"s": texts}).tolist() == [False, True]


@pytest.mark.parametrize("pattern", ["a\\", "\\a", "%\\\\\\b"])
def test_a_backslash_before_anything_else_is_refused(pattern):
    with pytest.raises(ValueError, match="a backslash at character"):
        evaluate(Like("s", pattern), {"s": np.array(["a"])})
