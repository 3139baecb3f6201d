"""Filters as text: ``price < 10 and lang == 'en'``, parsed by recursive descent and evaluated as SQL does.

::

    condition   = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation    = "not" negation | "(" condition ")" | test
    test        = name [ operator operand | [ "not" ] "in" "(" value { "," value } ")"
                       | [ "not" ] "between" operand "and" operand | "is" [ "not" ] "null" | [ "not" ] "like" text
                       | [ "not" ] "contains" ( operand | ( "any" | "all" ) "(" value { "," value } ")" ) ]
                | value operator name
    operand     = value | name
    operator    = "<" | "<=" | ">" | ">=" | "==" | "=" | "!="
    value       = [ "+" | "-" ] number | text | "true" | "false"

Text stands in single or double quotes; a quote inside is doubled. A name alone asks whether a bool is true.
``contains`` asks for items of a list: one value, any of several, or all of them. An attribute is compared with another
one of its type (``price < list_price``), integers with floats exactly, and lists with single values
(``tags contains brand``). In a pattern of ``like``, ``%`` stands for any text and ``_`` for one character; after a
backslash these, and the backslash, stand for themselves. A datetime is compared with text in ISO 8601
(``day >= '2024-01-31'``), in UTC where that names no time zone. Keywords may be written in capitals. A null compares to
unknown, not unknown is unknown, and only true rows are selected.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.columns import Column, ListColumn
from memhier.ann.zoom.filters.conditions import (
    KEYWORDS,
    And,
    AttributeType,
    Cells,
    ColumnWords,
    Comparison,
    Contains,
    Expression,
    IsNull,
    Like,
    ListCells,
    Membership,
    Not,
    Operator,
    Or,
    Pair,
    Value,
    check_names,
    check_types,
    on_columns,
    select,
)
from memhier.ann.zoom.filters.given import array_column
from memhier.ann.zoom.filters.lists import whole_lists
from memhier.ann.zoom.filters.pairs import WordReads
from memhier.ann.zoom.filters.patterns import Pattern

__all__ = ["And", "Comparison", "Contains", "Expression", "IsNull", "Like", "Membership", "Not", "Or", "Pair",
           "evaluate", "parse", "parse_for"]  # fmt: skip

LENGTH_MAX = 256 * 1024
DEPTH_MAX = 64
_DIGITS_MAX = 1000
_WORK_BYTES = 1 << 20
_SHORT = 256  # characters of a filter that is kept
_SHOWN = 60  # characters of the text to either side of a mistake
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
      | (?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign><=|>=|==|!=|[<>=(),+-]))""",
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*")
_OPERATORS: dict[str, Operator] = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "==", "=": "==", "!=": "!="}
_MIRRORED: dict[Operator, Operator] = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_VALUE = "a value (a number, 'text', true or false)"
_OPERAND = f"an attribute's name or {_VALUE}"


def parse(text: str) -> Expression:
    """Parse a filter.

    Parameters
    ----------
    text
        At most 256 KiB long, with at most 64 levels of parentheses and negations.

    Returns
    -------
    Expression
        A tree of frozen dataclasses; ``str()`` of it parses to the same tree.

    Raises
    ------
    TypeError
        When `text` is not text.
    ValueError
        When it is no filter; the message shows the place, and the tokens expected there.

    Examples
    --------
    >>> from memhier.ann.zoom.filters.where import parse
    >>> parse("price < 10 AND lang in ('en', 'de')").names
    ('lang', 'price')
    >>> print(parse("10 >= price or not (stock is not null and sold)"))
    price <= 10 or not (not stock is null and sold == true)
    >>> parse("(price < 3")
    Traceback (most recent call last):
        ...
    ValueError: where: expected 'and', 'or' or ')' at position 10, found the end
      (price < 3
                ^
    """
    if not isinstance(text, str):
        raise TypeError(f"where={text!r}: expected text such as \"price < 10 and lang == 'en'\"")
    if len(text) > LENGTH_MAX:
        raise ValueError(f"where: {len(text):,} characters, expected at most {LENGTH_MAX:,}; filter by ids instead")
    parser = _Parser(text)
    expression = parser.condition(0)
    if parser.kind != "end":
        parser.refuse("'and', 'or' or the end")
    return expression


def parse_for(text: str, types: Mapping[str, AttributeType]) -> Expression:
    """Parse a filter of an index with attributes of these types; see :func:`parse` and `check_types` for its errors."""
    is_short = isinstance(text, str) and len(text) <= _SHORT
    expression = _parse_again(text) if is_short else parse(text)
    if not types:
        raise ValueError(f"where={text!r}: this index has no attributes; give them to build() or add()")
    check_types(expression, types)
    return expression


_parse_again = lru_cache(maxsize=8)(parse)  # filters are often repeated


def evaluate(expression: Expression, columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Return the rows for which a filter is true.

    Parameters
    ----------
    expression
        From :func:`parse`.
    columns
        Arrays ``[n]`` by attribute: integers that fit int64, floats (NaN is null), bool, text, datetimes (NaT is null),
        or objects of one of these kinds with None for null; masked arrays are null where masked. Integers and floats
        compare exactly.

    Returns
    -------
    numpy.ndarray
        bool ``[n]``.

    Raises
    ------
    ValueError, TypeError
        For an attribute that is not among `columns`, one that is compared with a value of another kind, and columns of
        other kinds or of unequal lengths.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.zoom.filters.where import evaluate, parse
    >>> columns = {"price": np.array([5.0, 20.0, np.nan]), "lang": np.array(["en", "en", "de"])}
    >>> evaluate(parse("not price < 10"), columns).tolist()
    [False, True, False]
    """
    check_names(expression, columns)
    count = len(columns[expression.names[0]])
    used = {name: array_column(name, columns[name], count) for name in expression.names}
    types = {name: column.type for name, column in used.items()}
    check_types(expression, types)
    texts = {name: column.items if isinstance(column, ListColumn) else column for name, column in used.items()}
    words = {name: _words(column) for name, column in texts.items() if column.type == "str"}
    everything = np.arange(count)

    def cells(name: str) -> Cells | ListCells | None:
        column = used[name]
        if column.type is None:
            return None
        return whole_lists(column) if isinstance(column, ListColumn) else column.read(everything)

    return select(on_columns(expression, types, words), cells, count)


def _words(column: Column) -> ColumnWords:
    words = [word.decode() for word in column.words()]

    def find(texts: list[str]) -> dict[str, tuple[int, bool]]:
        """Return how many words stand before each text, and whether it is one of them."""
        places = {text: bisect_left(words, text) for text in texts}
        return {text: (at, words[at : at + 1] == [text]) for text, at in places.items()}

    def like(pattern: Pattern, low: int, high: int) -> npt.NDArray[np.uint8]:
        flags = [pattern.matches(word) for word in (words[low:] if high < 0 else words[low:high])]
        return np.packbits(np.array(flags, np.bool_), bitorder="little")

    def lengths(ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.zeros_like(ranks)  # The words are in DRAM already.

    def take(ranks: npt.NDArray[np.int64]) -> list[bytes]:
        return [words[rank].encode() for rank in ranks.tolist()]

    return ColumnWords(find, like, WordReads(lengths, take, _WORK_BYTES))


class _Parser:
    """Reads one token ahead: its kind and its text."""

    def __init__(self, text: str) -> None:
        self._whole = text
        self._token: re.Match[str] | None = None
        self._position = 0  # behind the token
        self.kind, self.text = "", ""
        self._advance()

    @property
    def start(self) -> int:
        """Where the token starts."""
        return len(self._whole) if self._token is None else self._token.start(str(self._token.lastgroup))

    def condition(self, depth: int) -> Expression:
        operands = [self._conjunction(depth)]
        while self._take("or"):
            operands.append(self._conjunction(depth))
        return operands[0] if len(operands) == 1 else Or(tuple(operands))

    def _conjunction(self, depth: int) -> Expression:
        operands = [self._negation(depth)]
        while self._take("and"):
            operands.append(self._negation(depth))
        return operands[0] if len(operands) == 1 else And(tuple(operands))

    def refuse(self, expected: str) -> NoReturn:
        found = "the end" if self.kind == "end" else self.text
        if len(found) > _SHOWN:
            found = found[:_SHOWN] + "..."
        self._fail(f"expected {expected} at position {self.start}, found {found}", self.start)

    def _negation(self, depth: int) -> Expression:
        if depth > DEPTH_MAX:
            position = self.start
            self._fail(f"nested more than {DEPTH_MAX} levels deep at position {position}", position)
        if self._take("not"):
            return Not(self._negation(depth + 1))
        if self._take("("):
            inner = self.condition(depth + 1)
            self._expect(")", "'and', 'or' or ')'")
            return inner
        return self._test()

    def _test(self) -> Expression:
        if self.kind != "name":
            value = self._value("an attribute's name, a value, 'not' or '('")
            sign = _MIRRORED[self._operator()]
            return Comparison(self._name(), sign, value)
        name = self._name()
        if self.text in _OPERATORS:
            return self._comparison(name, self._operator())
        if self.kind == "name" and (test := self._of_words(name)) is not None:
            return test
        if self._take("is"):
            negated = self._take("not")
            self._expect("null", "'null'" if negated else "'null' or 'not null'")
            return Not(IsNull(name)) if negated else IsNull(name)
        negated = self._take("not")
        test = self._of_several(name)
        if test is None and negated:
            self.refuse("'in', 'between', 'like' or 'contains'")
        if test is None:
            return Comparison(name, "==", True)
        return Not(test) if negated else test

    def _of_several(self, name: str) -> Expression | None:
        if self._take("in"):
            return Membership(name, self._values())
        if self._take("between"):
            low = self._comparison(name, ">=")
            self._expect("and", "'and'")
            return And((low, self._comparison(name, "<=")))
        return self._of_words(name)

    def _of_words(self, name: str) -> Expression | None:
        if self._take_word("contains"):
            return self._contains(name)
        if self._take_word("like"):
            if self.kind != "text":
                self.refuse("a pattern such as 'red%'")
            return Like(name, str(self._value("a pattern")))
        return None

    def _comparison(self, name: str, sign: Operator) -> Expression:
        if self.kind == "name":
            return Pair(name, sign, self._name())
        return Comparison(name, sign, self._value(_OPERAND))

    def _contains(self, name: str) -> Expression:
        if self.kind != "name":
            return Contains(name, (self._value(f"{_OPERAND}, 'any' or 'all'"),))
        other = self._name()
        if other.lower() not in ("any", "all") or self.kind in ("and", "or", ")", "end"):
            return Pair(name, "contains", other)
        values = self._values()
        if other.lower() == "any":
            return Contains(name, values)
        each = [Contains(name, (value,)) for value in values]
        return each[0] if len(each) == 1 else And(tuple(each))

    def _values(self) -> tuple[Value, ...]:
        self._expect("(", "'('")
        values = [self._value(_VALUE)]
        while self._take(","):
            values.append(self._value(_VALUE))
        self._expect(")", "',' or ')'")
        return tuple(values)

    def _name(self) -> str:
        name = self.text
        if self.kind != "name":
            self.refuse("an attribute's name")
        self._advance()
        return name

    def _operator(self) -> Operator:
        sign = _OPERATORS.get(self.text)
        if sign is None:
            self.refuse("a comparison (<, <=, >, >=, ==, !=)")
        self._advance()
        return sign

    def _value(self, expected: str) -> Value:
        sign = self.text if self.text in ("+", "-") else ""
        if sign:
            self._advance()
            if self.kind != "number":
                self.refuse("a number")
        kind, text = self.kind, self.text
        if kind == "number":
            number = self._number(sign + text)
            self._advance()
            return number
        if kind == "text":
            self._advance()
            return text[1:-1].replace(text[0] * 2, text[0])
        if kind in ("true", "false"):
            self._advance()
            return kind == "true"
        if kind == "null":
            start = self.start
            self._fail(f"nothing compares to null at position {start}: expected {_VALUE}, or 'is null'", start)
        self.refuse(expected)

    def _number(self, text: str) -> int | float:
        if len(text) > _DIGITS_MAX:
            self._fail(f"a number of {len(text)} characters at position {self.start}, expected fewer", self.start)
        if text.lstrip("+-").isdigit():
            return int(text)
        if math.isinf(float(text)):
            start = self.start
            self._fail(f"{text} at position {start} is beyond float64; write it without point and exponent", start)
        return float(text)

    def _take(self, kind: str) -> bool:
        found = self.kind == kind
        if found:
            self._advance()
        return found

    def _take_word(self, word: str) -> bool:
        """Take a word that attributes may have as their name, too: here no name can stand."""
        found = self.kind == "name" and self.text.lower() == word
        if found:
            self._advance()
        return found

    def _expect(self, kind: str, expected: str) -> None:
        if not self._take(kind):
            self.refuse(expected)

    def _advance(self) -> None:
        self._token = match = _TOKEN.match(self._whole, self._position)
        if match is None:
            self._end()
            return
        self._position = match.end()
        kind = str(match.lastgroup)
        self.text = text = match[kind]
        if kind == "name":
            kind = word if (word := text.lower()) in KEYWORDS else kind
        elif kind == "sign":
            kind = text
        elif kind == "number" and self._whole[self._position : self._position + 1].isidentifier():
            self._fail(f"a letter right after a number at position {self._position}", self._position)
        self.kind = kind

    def _end(self) -> None:
        """Take the end of the filter; refuse anything else that is no token."""
        space = _SPACE.match(self._whole, self._position)
        start = space.end() if space else self._position
        if start < len(self._whole):
            character = self._whole[start]
            fault = "text without its closing quote" if character in "'\"" else f"unexpected {character!r}"
            self._fail(f"{fault} at position {start}", start)
        self.kind, self.text = "end", ""

    def _fail(self, message: str, position: int) -> NoReturn:
        low, high = max(0, position - _SHOWN), position + _SHOWN
        shown = re.sub(r"\s", " ", self._whole[low:high])
        raise ValueError(f"where: {message}\n  {shown}\n  {' ' * (position - low)}^")
