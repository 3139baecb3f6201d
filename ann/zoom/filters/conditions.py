"""Conditions on attributes: the tree of a filter, and the rows that it selects by SQL's three-valued logic."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.pairs import COMPARE, WordReads, compare, compare_words
from memhier.ann.zoom.filters.patterns import Pattern
from memhier.ann.zoom.filters.times import moment_of_text

__all__ = [
    "KEYWORDS",
    "LIST_TYPES",
    "SORTED_BYTES",
    "And",
    "AttributeType",
    "Cells",
    "CodeSet",
    "ColumnWords",
    "Comparison",
    "Contains",
    "Expression",
    "IsNull",
    "Leaf",
    "Like",
    "ListCells",
    "Membership",
    "Not",
    "Operator",
    "Or",
    "Pair",
    "Value",
    "check_name",
    "check_names",
    "check_types",
    "conjuncts",
    "is_list",
    "item_type",
    "leaves",
    "names_of",
    "on_columns",
    "points_of",
    "row_bytes",
    "select",
    "values_of",
]

ItemType: TypeAlias = Literal["int64", "float64", "bool", "str", "datetime"]
ListType: TypeAlias = Literal[
    "list[int64]", "list[float64]", "list[bool]", "list[str]", "list[datetime]", "list[]"
]  # the last one where all lists are empty
AttributeType: TypeAlias = ItemType | ListType
Operator: TypeAlias = Literal["<", "<=", ">", ">=", "==", "!="]
Value: TypeAlias = bool | int | float | str
Flags: TypeAlias = npt.NDArray[np.bool_]
Ranks: TypeAlias = Mapping[str, tuple[int, bool]]  # by literal: the words before it, and whether it is one

LIST_TYPES: Mapping[ItemType, ListType] = {
    "int64": "list[int64]", "float64": "list[float64]", "bool": "list[bool]", "str": "list[str]",
    "datetime": "list[datetime]",
}  # fmt: skip
_ITEM_TYPES: Mapping[str, ItemType] = {kind: item for item, kind in LIST_TYPES.items()}

KEYWORDS = frozenset({"and", "or", "not", "in", "between", "is", "null", "true", "false"})
_EXPECTED: Mapping[str, str] = {"bool": "bool", "str": "str", "datetime": "str"}  # kinds of literals, beside numbers
# No row that has a value has this code.
_NO_CODE = -1
SORTED_BYTES = 50  # of a row that is looked for in a sorted list
_PAIR_BYTES = 48  # of a row whose integer is compared with a float


class Expression:
    """A condition on the attributes of a row: true, false or, where a null decides, unknown.

    ``str()`` gives text that parses to the same tree.
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes it asks about, sorted."""
        return tuple(sorted({name for leaf in leaves(self) for name in names_of(leaf)}))


@dataclass(frozen=True, slots=True)
class Comparison(Expression):
    """``name operator value``."""

    name: str
    operator: Operator
    value: Value

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {_literal(self.value)}"


@dataclass(frozen=True, slots=True)
class Membership(Expression):
    """``name in (values)``."""

    name: str
    values: tuple[Value, ...]

    def __str__(self) -> str:
        return f"{self.name} in ({', '.join(map(_literal, self.values))})"


@dataclass(frozen=True, slots=True)
class Contains(Expression):
    """``name contains any (values)``: whether a list holds one of them."""

    name: str
    values: tuple[Value, ...]

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.name} contains {_literal(self.values[0])}"
        return f"{self.name} contains any ({', '.join(map(_literal, self.values))})"


@dataclass(frozen=True, slots=True)
class Like(Expression):
    """``name like 'pattern'``."""

    name: str
    pattern: str

    def __str__(self) -> str:
        return f"{self.name} like {_literal(self.pattern)}"


@dataclass(frozen=True, slots=True, eq=False)
class CodeSet(Expression):
    """Whether the code of a string is in a set: bit ``i`` of uint8 ``bits`` is that of code ``first + i``."""

    name: str
    first: int
    bits: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Pair(Expression):
    """``name operator other``, of two attributes of a row.

    Attributes
    ----------
    words
        The words of both columns, where they hold codes of strings of two vocabularies.
    """

    name: str
    operator: Operator | Literal["contains"]
    other: str
    words: tuple[WordReads, WordReads] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {self.other}"


@dataclass(frozen=True, slots=True)
class IsNull(Expression):
    """``name is null``; never unknown."""

    name: str

    def __str__(self) -> str:
        return f"{self.name} is null"


@dataclass(frozen=True, slots=True)
class Not(Expression):
    """``not operand``."""

    operand: Expression

    def __str__(self) -> str:
        return f"not {_nested(self.operand)}"


@dataclass(frozen=True, slots=True)
class And(Expression):
    """All of two or more operands."""

    operands: tuple[Expression, ...]

    def __str__(self) -> str:
        return " and ".join(map(_nested, self.operands))


@dataclass(frozen=True, slots=True)
class Or(Expression):
    """Any of two or more operands."""

    operands: tuple[Expression, ...]

    def __str__(self) -> str:
        return " or ".join(map(_nested, self.operands))


Leaf: TypeAlias = Contains | Comparison | Membership | Like | CodeSet | Pair | IsNull


class ColumnWords(NamedTuple):
    """The words of a column of strings.

    Attributes
    ----------
    find
        Takes literals to their ranks.
    like
        Takes a pattern and two ranks: a bit for each word from one to before the other (-1: to the last) says whether
        it is of the pattern.
    reads
        Reads words by their ranks.
    """

    find: Callable[[list[str]], Ranks]
    like: Callable[[Pattern, int, int], npt.NDArray[np.uint8]]
    reads: WordReads


class Cells(NamedTuple):
    """A run of a column: values of any content where null, and which rows are null (None: none of them)."""

    values: npt.NDArray[Any]
    nulls: Flags | None


class ListCells(NamedTuple):
    """A run of a column of lists.

    Attributes
    ----------
    starts
        int64 ``[n + 1]``: the item at which each list begins, and the one behind the last list.
    nulls
        Which rows are null; None: none of them.
    items
        Yields runs of all items, each with the number of its first.
    holding
        Takes items to the rows that hold one of them; None where these are found by `starts` and `items`.
    """

    starts: npt.NDArray[np.int64]
    nulls: Flags | None
    items: Callable[[], Iterator[tuple[int, npt.NDArray[Any]]]]
    holding: Callable[[tuple[Value, ...]], Flags] | None = None


def is_list(kind: AttributeType | None) -> bool:
    """Return whether values of a type are lists."""
    return kind == "list[]" or kind in _ITEM_TYPES


def item_type(kind: AttributeType | None) -> ItemType | None:
    """Return the type of single values: that of the items of lists, or the type itself; None where it is not known."""
    if kind is None or kind == "list[]":
        return None
    return _ITEM_TYPES.get(kind) or cast(ItemType, kind)


def leaves(expression: Expression) -> list[Leaf]:
    """Return the conditions without operands."""
    if isinstance(expression, Leaf):
        return [expression]
    if isinstance(expression, Not):
        return leaves(expression.operand)
    assert isinstance(expression, And | Or)
    return [leaf for operand in expression.operands for leaf in leaves(operand)]


def conjuncts(expression: Expression) -> list[Expression]:
    """Return conditions that are all true where one is."""
    if not isinstance(expression, And):
        return [expression]
    found = list[Expression]()
    for operand in expression.operands:
        found += conjuncts(operand) if isinstance(operand, And) else (operand,)
    return found


def row_bytes(expression: Expression) -> int:
    """Return the bytes that :func:`select` holds for each row, beside its columns."""
    if isinstance(expression, Not):
        return row_bytes(expression.operand)
    if isinstance(expression, And | Or):
        return 1 + max(map(row_bytes, expression.operands))
    if isinstance(expression, Pair):
        return _PAIR_BYTES
    return SORTED_BYTES if isinstance(expression, Membership | CodeSet) else 2


def names_of(leaf: Leaf) -> tuple[str, ...]:
    """Return the attributes that a condition asks about."""
    return (leaf.name, leaf.other) if isinstance(leaf, Pair) else (leaf.name,)


def values_of(leaf: Leaf) -> tuple[Value, ...]:
    """Return the literals of a condition."""
    if isinstance(leaf, Comparison):
        return (leaf.value,)
    return leaf.values if isinstance(leaf, Membership | Contains) else ()


def check_names(expression: Expression, known: Mapping[str, Any]) -> None:
    """Refuse unknown attributes of a filter."""
    _check_names(leaves(expression), known)


def _check_names(every: Sequence[Leaf], known: Mapping[str, Any]) -> None:
    for leaf in every:
        if leaf.name not in known:
            check_name(leaf.name, known)
        if isinstance(leaf, Pair):
            check_name(leaf.other, known, f"; text stands in quotes: {leaf.name} {leaf.operator} '{leaf.other}'")


def check_name(name: str, known: Mapping[str, Any], hint: str = "") -> None:
    """Refuse an unknown attribute; the message names the known ones."""
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    listed = f"expected one of {', '.join(sorted(known))}" if known else "there are none"
    raise ValueError(f"no attribute {name!r}: {guess}{listed}{hint}")


def check_types(expression: Expression, types: Mapping[str, AttributeType | None]) -> None:
    """Refuse unknown attributes, and comparisons of an attribute with a value, or another attribute, of another type.

    An attribute of type None is null in every row and compares with anything.

    Raises
    ------
    ValueError, TypeError
    """
    every = leaves(expression)
    _check_names(every, types)
    for leaf in every:
        kind = types[leaf.name]
        if isinstance(leaf, Pair):
            _check_pair(leaf, kind, types[leaf.other])
            continue
        if kind is None:
            continue
        if not isinstance(leaf, IsNull):
            _check_lists(leaf, kind, isinstance(leaf, Contains))
        if (kind := item_type(kind)) is None:
            continue
        if isinstance(leaf, Like):
            _pattern(leaf)
            if kind != "str":
                raise TypeError(f"{leaf}: attribute {leaf.name!r} is {types[leaf.name]}; expected text for like")
        expected = _EXPECTED.get(kind, "number")
        for value in values_of(leaf):
            came = "bool" if isinstance(value, bool) else "str" if isinstance(value, str) else "number"
            if came != expected:
                name = type(value).__name__
                hint = ", but with text such as '2024-01-31 12:00'" if kind == "datetime" else ""
                raise TypeError(
                    f"{leaf}: attribute {leaf.name!r} is {types[leaf.name]}, it cannot be compared with {name}{hint}"
                )
            if kind == "datetime":
                _moment(leaf, str(value))
        if kind == "bool" and isinstance(leaf, Comparison) and leaf.operator not in ("==", "!="):
            raise TypeError(f"{leaf}: attribute {leaf.name!r} is bool, which has no order; expected == or !=")


def _check_lists(leaf: Leaf, kind: AttributeType, contains: bool) -> None:
    """Refuse `contains` of single values, and other comparisons of lists."""
    if contains != is_list(kind):
        expected = "contains, which finds items of lists" if is_list(kind) else "a comparison; lists have contains"
        raise TypeError(f"{leaf}: attribute {leaf.name!r} is {kind}; expected {expected}")


def _check_pair(leaf: Pair, kind: AttributeType | None, other: AttributeType | None) -> None:
    """Refuse attributes that cannot be compared with each other."""
    if kind is not None:
        _check_lists(leaf, kind, leaf.operator == "contains")
    if is_list(other):
        raise TypeError(f"{leaf}: attribute {leaf.other!r} is {other}; expected single values on the right")
    item = item_type(kind)
    numbers = {item, other} <= {"int64", "float64"}
    if item is not None and other is not None and item != other and not numbers:
        raise TypeError(
            f"{leaf}: attribute {leaf.name!r} is {kind}; it cannot be compared with attribute "
            f"{leaf.other!r}, which is {other}"
        )
    if "bool" in (item, other) and leaf.operator not in ("==", "!=", "contains"):
        name = leaf.name if item == "bool" else leaf.other
        raise TypeError(f"{leaf}: attribute {name!r} is bool, which has no order; expected == or !=")


def on_columns(
    expression: Expression, types: Mapping[str, AttributeType | None], words: Mapping[str, ColumnWords]
) -> Expression:
    """Return the same condition on values as columns hold them: microseconds of moments, and codes of strings.

    Parameters
    ----------
    types
        By attribute.
    words
        By attribute of strings, where there is a column.
    """
    if not words and "datetime" not in types.values() and "list[datetime]" not in types.values():
        return expression
    texts: dict[str, dict[str, None]] = {}
    for leaf in leaves(expression):
        if leaf.name in words:
            texts.setdefault(leaf.name, {}).update(dict.fromkeys(_sought(leaf)))
    ranks = {name: words[name].find(list(different)) for name, different in texts.items()}

    def on_column(leaf: Leaf) -> Expression:
        if isinstance(leaf, Pair):
            both = leaf.name in words and leaf.other in words and leaf.name != leaf.other
            return replace(leaf, words=(words[leaf.name].reads, words[leaf.other].reads)) if both else leaf
        if isinstance(leaf, IsNull | CodeSet):
            return leaf
        if types.get(leaf.name) in ("datetime", "list[datetime]"):
            moments = tuple([_moment(leaf, str(value)) for value in values_of(leaf)])
            if isinstance(leaf, Comparison):
                return Comparison(leaf.name, leaf.operator, moments[0])
            assert not isinstance(leaf, Like)
            return replace(leaf, values=moments)
        if leaf.name not in ranks:
            return leaf
        if isinstance(leaf, Like):
            return _like_codes(leaf, ranks[leaf.name], words[leaf.name])
        return _on_codes(leaf, ranks[leaf.name])

    return _changed(expression, on_column)


def _sought(leaf: Leaf) -> list[str]:
    """Return the texts whose ranks a condition needs."""
    if not isinstance(leaf, Like):
        return [str(value) for value in values_of(leaf)]
    pattern = _pattern(leaf)
    return [text for text in (pattern.prefix, pattern.beyond) if text is not None]


def _pattern(leaf: Like) -> Pattern:
    try:
        return Pattern.of(leaf.pattern)
    except ValueError as error:
        raise ValueError(f"{leaf}: {error}") from None


def _like_codes(leaf: Like, ranks: Ranks, words: ColumnWords) -> Expression:
    """Return the condition of a pattern on the codes of strings."""
    pattern = _pattern(leaf)
    low, present = ranks[pattern.prefix]
    if pattern.kind == "text":
        return Comparison(leaf.name, "==", low if present else _NO_CODE)
    high = None if pattern.beyond is None else ranks[pattern.beyond][0]
    if pattern.kind == "prefix":
        least = Comparison(leaf.name, ">=", low)
        return least if high is None else And((least, Comparison(leaf.name, "<", high)))
    return CodeSet(leaf.name, low, words.like(pattern, low, -1 if high is None else high))


def _changed(expression: Expression, change: Callable[[Leaf], Expression]) -> Expression:
    if isinstance(expression, Not):
        return Not(_changed(expression.operand, change))
    if isinstance(expression, And | Or):
        return type(expression)(tuple([_changed(operand, change) for operand in expression.operands]))
    assert isinstance(expression, Leaf)
    return change(expression)


def _moment(leaf: Leaf, text: str) -> int:
    try:
        return moment_of_text(text)
    except ValueError as error:
        raise ValueError(
            f"{leaf}: attribute {leaf.name!r} is datetime, and {text!r} is no moment ({error}); expected ISO 8601 such "
            f"as '2024-01-31' or '2024-01-31T12:00:00+01:00', to the microsecond at most"
        ) from None


def _on_codes(leaf: Comparison | Membership | Contains, ranks: Ranks) -> Leaf:
    """Return the same condition on the codes of strings, which are their ranks in a sorted vocabulary."""
    found = [ranks[str(value)] for value in values_of(leaf)]
    if not isinstance(leaf, Comparison):
        return replace(leaf, values=tuple([rank for rank, present in found if present]))
    rank, present = found[0]
    if leaf.operator in ("==", "!="):
        return Comparison(leaf.name, leaf.operator, rank if present else _NO_CODE)
    if leaf.operator in ("<", ">="):
        return Comparison(leaf.name, leaf.operator, rank)
    return Comparison(leaf.name, "<" if leaf.operator == "<=" else ">=", rank + present)


def select(
    expression: Expression, cells: Callable[[str], Cells | ListCells | None], count: int, wanted: bool = True
) -> Flags:
    """Return the rows where a condition is `wanted`, bool [count]; where it is unknown it is neither.

    Negations are pushed down to the conditions on single attributes (De Morgan's laws hold with three values, too),
    so that the unknown rows need no array of their own.

    Parameters
    ----------
    cells
        Takes a name to its column; None is a column of nulls only.
    """
    if isinstance(expression, Not):
        return select(expression.operand, cells, count, not wanted)
    if isinstance(expression, And | Or):
        every = isinstance(expression, And) == wanted
        rows = select(expression.operands[0], cells, count, wanted)
        for operand in expression.operands[1:]:
            if not rows.any() if every else rows.all():
                break  # Further columns cannot change the result: they are not read.
            further = select(operand, cells, count, wanted)
            np.logical_and(rows, further, out=rows) if every else np.logical_or(rows, further, out=rows)
        return rows
    assert isinstance(expression, Leaf)
    if isinstance(expression, IsNull):
        column = cells(expression.name)
        nulls = np.full(count, column is None) if column is None or column.nulls is None else column.nulls.copy()
        return nulls if wanted else ~nulls
    columns: list[Cells | ListCells] = []
    for name in names_of(expression):
        if (column := cells(name)) is None:
            return np.zeros(count, np.bool_)
        columns.append(column)
    rows = _holding(columns, expression)
    if not wanted:
        np.logical_not(rows, out=rows)
    for column in columns:
        if column.nulls is not None:
            rows &= ~column.nulls
    return rows


def _holding(columns: Sequence[Cells | ListCells], leaf: Leaf) -> Flags:
    """Return the rows where a condition holds; anything where one of its columns is null."""
    if isinstance(leaf, Pair):
        return _paired(columns[0], columns[1], leaf)
    if isinstance(columns[0], ListCells):
        assert isinstance(leaf, Contains)
        return _containing(columns[0], leaf) if columns[0].holding is None else columns[0].holding(leaf.values)
    assert isinstance(leaf, Comparison | Membership | CodeSet)
    return _matches(columns[0].values, leaf)


def _paired(column: Cells | ListCells, other: Cells | ListCells, leaf: Pair) -> Flags:
    """Return the rows where two columns compare so; anything where one of them is null."""
    assert isinstance(other, Cells)

    def compared(values: npt.NDArray[Any], others: npt.NDArray[Any], sign: str) -> Flags:
        if leaf.words is None:
            return compare(values, others, sign)
        return compare_words(values, others, sign, *leaf.words)

    if isinstance(column, Cells):
        return compared(column.values, other.values, leaf.operator)
    rows = np.zeros(len(other.values), np.bool_)
    for first, values in column.items():
        of = np.searchsorted(column.starts, np.arange(first, first + len(values)), side="right") - 1
        rows[of[compared(values, other.values[of], "==")]] = True
    return rows


def _containing(lists: ListCells, leaf: Contains) -> Flags:
    """Return which lists hold one of the values of a condition."""
    rows = np.zeros(len(lists.starts) - 1, np.bool_)
    for first, values in lists.items() if leaf.values else ():
        found = first + np.flatnonzero(_matches(values, Membership(leaf.name, leaf.values)))
        rows[np.searchsorted(lists.starts, found, side="right") - 1] = True
    return rows


def _matches(values: npt.NDArray[Any], leaf: Comparison | Membership | CodeSet) -> Flags:
    if isinstance(leaf, CodeSet):
        place = values - values.dtype.type(leaf.first)
        known: Flags = (place >= 0) & (place < 8 * len(leaf.bits))
        if not known.any():
            return known
        place[~known] = 0
        bit = np.left_shift(1, place & 7, dtype=np.uint8, casting="unsafe")
        place >>= 3
        known &= (leaf.bits[place] & bit) != 0
        return known
    if isinstance(leaf, Membership):
        return np.isin(values, points_of(leaf.values, values.dtype))
    test = _narrow(values.dtype, leaf.operator, leaf.value)
    if isinstance(test, bool):
        return np.full(len(values), test)
    return COMPARE[test[0]](values, values.dtype.type(test[1]))


def points_of(values: tuple[Value, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values that a column of a type can hold, each once, ascending."""
    if len(values) == 1 and dtype == np.int64 and type(values[0]) is int and -(2**63) <= values[0] < 2**63:
        return np.array(values, np.int64)  # as most filters have it
    narrowed = [_narrow(dtype, "==", value) for value in values]
    return np.unique(np.array([point[1] for point in narrowed if not isinstance(point, bool)], dtype))


def _narrow(dtype: np.dtype[Any], operator: Operator, value: Value) -> tuple[Operator, int | float] | bool:
    """Return the same comparison with a value of the column's own type, or its result where all rows have the same.

    Neither side is rounded: 2**53 + 1 is a number between two floats and 2.5 one between two integers.
    """
    assert not isinstance(value, str)
    if dtype.kind == "f":
        near = _as_float(value)
        if near == value:
            return operator, near
        if near < value:
            return _between(operator, near, math.nextafter(near, math.inf))
        return _between(operator, math.nextafter(near, -math.inf), near)
    if value != math.floor(value):
        return _between(operator, math.floor(value), math.floor(value) + 1)
    limits = np.iinfo(dtype)
    if value < limits.min:
        return operator in (">", ">=", "!=")
    if value > limits.max:
        return operator in ("<", "<=", "!=")
    return operator, int(value)


def _between(operator: Operator, below: float, above: float) -> tuple[Operator, float] | bool:
    """Return the comparison with a number between two neighbouring values of a type; see :func:`_narrow`."""
    if operator in ("==", "!="):
        return operator == "!="
    return ("<=", below) if operator in ("<", "<=") else (">=", above)


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _literal(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value)


def _nested(expression: Expression) -> str:
    return f"({expression})" if isinstance(expression, And | Or) else str(expression)
