"""The description of an index in the store's catalog, and the segments of its preview."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.filters.columns import DTYPES
from memhier.ann.zoom.filters.conditions import LIST_TYPES
from memhier.ann.zoom.payload.given import NAMES_MOST
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import CODINGS, Coding, Preview
from memhier.ann.zoom.preview.product import ProductBook
from memhier.ann.zoom.preview.routing.router import Router
from memhier.ann.zoom.preview.scan import CODES_PER_BOOK
from memhier.ann.zoom.preview.space import METRICS, PreviewSpace, core_dimension
from memhier.ann.zoom.storage.ids import IdKind
from memhier.errors import CorruptionError, FormatError
from memhier.fields import (
    boolean,
    decode_json,
    described,
    integer,
    mapping,
    one_of,
    optional,
    real,
    record,
    row,
    sequence,
    stored_array,
    text,
)
from memhier.store.store import Staging, Store, Transaction

__all__ = [
    "AUDIT_KEY", "COMMON_FIELDS", "KIND", "NAME_FIELDS", "VERSION", "Description", "book_arrays", "load_book",
    "load_preview", "write_preview",
]  # fmt: skip

KIND = "zoom-index"
AUDIT_KEY = "audit"  # of the record of the audit
VERSION = 10
# Versions read beside it: 9 has no changes of attributes, 8 no codes on SSD and a router of faiss, 7 no lists as
# attributes, 6 no documents either.
_READ = (6, 7, 8, 9)


_NAME = text(r"[A-Za-z0-9_-]{1,100}")
_PART = text(r"p[0-9]{1,18}")
_EFFORT = row(
    integer(1, 2**31), real(0), optional(integer(1, 2**20)), optional(integer(1, 2**20)), integer(0, 2**31),
    real(), integer(1, 2**20), real(0), without=1,
)  # fmt: skip
_STEP = row(real(0, 1), _EFFORT, real(0))
_BY_K = text(r"[1-9][0-9]{0,9}")
_LIST = text(r"0|[1-9][0-9]{0,9}")
_CHANGES = sequence(row(integer(1), optional(integer(1, 2**40))), 1)
_PARTS = sequence(
    record(
        {"name": _PART, "rows": integer(0, 2**40), "ids": one_of("<u4", "<i8"), "alive": optional(_NAME)},
        {"changes": mapping(_CHANGES, text(r"[A-Za-z_][A-Za-z0-9_]{0,63}"))},
    )
)
COMMON_FIELDS = {
    "version": integer(),
    "dtype": one_of("float32", "float16", "int8", "uint8"),
    "dram": integer(1),
    "searches": integer(1, 2**16),
    "seed": integer(0, 2**32),
    "schema": mapping(one_of(*DTYPES, *LIST_TYPES.values())),
    "next_part": integer(),
    "next_id": integer(0, 2**63),
    "trained_on": integer(),
}
"""Of the description of an index of either kind."""
NAME_FIELDS = {"id_kind": one_of("int64", "str"), "documents": sequence(text(r"[\s\S]{1,200}"), most=NAMES_MOST)}
"""Of the same, which early versions lack."""
_CHECK = record(
    COMMON_FIELDS | {
        "space": record({
            "metric": one_of(*METRICS), "dimension": integer(1, 2**20), "padded": integer(1, 2**21),
            "scale": real(5e-324, 1e308),
        }),
        "coding": one_of(*CODINGS),
        "lists": integer(1, 2**31),
        "book_bytes": integer(1, 2**22),
        "calibration": record({
            "queries": integer(),
            "vectors": integer(),
            "changes": integer(),
            "tuned": boolean,
            "efforts": mapping(sequence(_STEP, 1), _BY_K, least=1),
            "reached": mapping(real(0, 1), _BY_K, least=1),
            "alone": sequence(row(real(0, 1), real(0))),
        }, {
            "tried": mapping(sequence(_STEP), _BY_K),
            "clear": mapping(sequence(row(real(0, 1), real(0)), 1), _BY_K),
            "one_way": real(0),
            "own_way": real(0),
            "strayed": real(0),
            "overstated": boolean,
            "far": real(0),
            "strange": real(0),
            "earlier": integer(),
            "made_for": integer(),
            "bounds_missed": boolean,
            "cost": real(0),
            "first_cost": real(0),
            "narrow": mapping(real(0), _BY_K),
            "strays": record({"rim": real(0), "lists": mapping(row(real(0), real(0), text(r"([0-9a-f]{2})*")), _LIST)}),
        }),
        "parts": _PARTS,
        "pending": _PARTS,
        "hot": sequence(row(_PART, integer())),
        "id_kind": NAME_FIELDS["id_kind"],
    },
    {"documents": NAME_FIELDS["documents"], "on_ssd": boolean},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Description:
    """The entry ``index`` of the catalog: the description of an index.

    Attributes
    ----------
    dtype, space, coding, lists, book_bytes
        Of vectors and codes; `book_bytes` is the size of a code.
    dram, seed
        As given at build.
    searches
        Searches at a time.
    schema
        Types of the attributes.
    next_part, next_id
        Number of the next part, and the next free id.
    trained_on
        The number of vectors when the lists were last made.
    calibration
        The effort for each recall.
    parts
        Entries of the parts.
    pending
        Entries of parts that no commit of the index has taken over.
    hot
        Pages to hold in DRAM, as pairs of part name and page.
    id_kind
        The type of the ids.
    documents
        Names of the documents, in the order of their numbers.
    on_ssd
        Whether codes and ids stay on SSD.
    """

    dtype: str
    space: PreviewSpace
    coding: Coding
    lists: int
    book_bytes: int
    dram: int
    searches: int
    seed: int
    schema: Schema
    next_part: int
    next_id: int
    trained_on: int
    calibration: Calibration
    parts: list[dict[str, Any]]
    pending: list[dict[str, Any]] = field(default_factory=list)
    hot: list[tuple[str, int]] = field(default_factory=list)
    id_kind: IdKind = "int64"
    documents: list[str] = field(default_factory=list)
    on_ssd: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector on SSD."""
        return np.dtype(self.dtype).itemsize * self.space.dimension

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"version": VERSION} | values | {"space": asdict(self.space), "calibration": self.calibration.to_json()}

    @classmethod
    def decode(cls, raw: bytes, path: object) -> Self:
        """Return the description from the JSON text of :meth:`to_json`.

        Raises
        ------
        FormatError, CorruptionError
            When it is of another version, or no description of an index.
        """
        where = f"{path}: the value 'index'"
        version = decode_json(raw, where, record({"version": integer()})).get("version")
        if version not in (VERSION, *_READ):
            raise FormatError(f"{path}: index format {version}, this memhier reads {VERSION}; build the index again")
        values = decode_json(raw, where, _CHECK)
        del values["version"]
        with described(where):
            values["space"] = PreviewSpace(**values["space"])
            values["calibration"] = Calibration.from_json(values["calibration"])
            found = cls(**values)
        space = found.space
        if core_dimension(space.metric, space.dimension) > space.padded:
            raise CorruptionError(f"{where}: {space.dimension} dimensions in a space of {space.padded}")
        if len({*found.documents, *found.schema}) != len(found.documents) + len(found.schema):
            raise CorruptionError(f"{where}: attributes and documents of one name")
        if found.on_ssd and found.coding != "rabitq":
            raise CorruptionError(f"{where}: codes of preview='pq' on SSD")
        known = found.calibration.efforts.keys()
        if known != found.calibration.reached.keys() or not found.calibration.tried.keys() <= known:
            raise CorruptionError(f"{where}: efforts and recalls are of other numbers of neighbours")
        if (strays := found.calibration.strays) is not None and max(strays.lists, default=-1) >= found.lists:
            raise CorruptionError(f"{where}: strays in a list beyond the {found.lists} of the index")
        return found


def write_preview(tx: Transaction | Staging, preview: Preview, *, radii: bool = True) -> None:
    """Write lists and code book; with `radii` also the radii of the lists, which every commit writes anew."""
    book = preview.book
    arrays: dict[str, npt.NDArray[Any]] = {"router": preview.router.save()}
    if radii:
        arrays["radii"] = preview.radii
    if isinstance(book, CodeBook):
        arrays |= book_arrays(book)
    else:
        arrays["codebook"] = book.books
    for name, array in arrays.items():
        tx.segment(name).append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def book_arrays(book: CodeBook) -> dict[str, npt.NDArray[Any]]:
    """Return the contents of the segments of a code book by name; :func:`load_book` reads them."""
    numbers = np.array([*book.dimensions, book.rotation.ndim], np.int64)
    arrays = {"rotation": book.rotation, "alpha": book.alpha, "share": book.share, "book": numbers}
    return {**arrays, "unit": np.array([book.unit]), "ratios": book.ratios}


def load_preview(store: Store, about: Description) -> Preview:
    """Return lists and code book as the catalog describes them."""
    dimension, inner = about.space.padded, about.space.metric == "ip"
    with described(f"{store.path}: the preview"):
        radii = stored_array(store, "radii", np.float32, (about.lists,))
        router = Router.load(stored_array(store, "router", np.uint8, (-1,)), about.lists, dimension, store.path)
        if about.coding == "pq":
            books = stored_array(store, "codebook", np.float32, (about.book_bytes, -1, CODES_PER_BOOK))
            if books.shape[0] * books.shape[1] < dimension:
                raise CorruptionError(f"{store.path}: a code book of {books.shape} for {dimension} dimensions")
            return Preview(router, ProductBook(books), radii, inner)
        book = load_book(store, dimension)
        if book.code_bytes != about.book_bytes:
            raise CorruptionError(f"{store.path}: codes of {book.code_bytes} bytes, expected {about.book_bytes}")
        return Preview(router, book, radii, inner, about.on_ssd)


def load_book(store: Store, dimension: int) -> CodeBook:
    """Return the code book of a store, of vectors with `dimension` axes."""
    *widths, axes = stored_array(store, "book", np.int64, (5,)).tolist()
    if not all(0 <= width <= dimension for width in widths) or not 0 < sum(widths) <= dimension or axes not in (1, 2):
        raise CorruptionError(f"{store.path}: the segment 'book' says {[*widths, axes]} of {dimension} dimensions")
    if axes == 2:
        rotation = stored_array(store, "rotation", np.float32, (dimension, dimension))
    else:
        rotation = stored_array(store, "rotation", np.int64, (dimension,))
        if not np.array_equal(np.sort(rotation), np.arange(dimension)):
            raise CorruptionError(f"{store.path}: the segment 'rotation' is no order of {dimension} axes")
    eight, four, two, one = widths
    return CodeBook(
        rotation,
        (eight, four, two, one),
        stored_array(store, "alpha", np.float32, (sum(widths),)),
        stored_array(store, "share", np.float32, (dimension,)),
        float(stored_array(store, "unit", np.float64, (1,))[0]),
        stored_array(store, "ratios", np.int32, (4,)),
    )
