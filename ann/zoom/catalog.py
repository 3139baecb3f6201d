"""What the store's catalog says of an index, and the segments of its preview."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from memhier.ann.zoom.attributes import Schema
from memhier.ann.zoom.calibrate import Calibration
from memhier.ann.zoom.codes import CodeBook
from memhier.ann.zoom.ids import IdKind
from memhier.ann.zoom.preview import Coding, Preview
from memhier.ann.zoom.product import ProductBook
from memhier.ann.zoom.router import Router
from memhier.ann.zoom.scan import CODES_PER_BOOK
from memhier.ann.zoom.space import PreviewSpace
from memhier.errors import CorruptionError, FormatError
from memhier.store import Store, Transaction

__all__ = ["KIND", "VERSION", "Description", "load_preview", "write_preview"]

KIND = "zoom-index"
VERSION = 5


@dataclass(frozen=True, slots=True)
class Description:
    """The entry ``index`` of the catalog.

    Attributes
    ----------
    dtype, space, coding, lists, book_bytes
        Of vectors and codes; `book_bytes` is what one code takes.
    dram, seed
        As given at build.
    searches
        How many may run at a time.
    schema
        Types of the attributes.
    next_part, next_id
        Number of the next part, and of the next vector that comes without an id.
    trained_on
        Vectors there were when the lists were last made.
    calibration
        What a declared recall takes.
    parts
        Entries of the parts.
    pending
        Entries of parts that no commit of the index has made its own.
    hot
        Pages to hold in DRAM, as pairs of part name and page.
    id_kind
        What callers call vectors.
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

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector on SSD."""
        return np.dtype(self.dtype).itemsize * self.space.dimension

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"version": VERSION} | values | {"space": asdict(self.space), "calibration": self.calibration.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any], path: object) -> Self:
        """Return what :meth:`to_json` gave."""
        version = values.pop("version", None)
        if version != VERSION:
            raise FormatError(f"{path}: index format {version}, this memhier reads {VERSION}; build the index again")
        values["space"] = PreviewSpace(**values["space"])
        values["calibration"] = Calibration.from_json(values["calibration"])
        return cls(**values)


def write_preview(tx: Transaction, preview: Preview) -> None:
    """Write lists and code book."""
    book = preview.book
    arrays = {"router": preview.router.save(), "radii": preview.radii}
    if isinstance(book, CodeBook):
        numbers = np.array([*book.dimensions, book.rotation.ndim], np.int64)
        arrays |= {
            "rotation": book.rotation,
            "alpha": book.alpha,
            "share": book.share,
            "book": numbers,
        }
        arrays |= {"unit": np.array([book.unit]), "ratios": book.ratios}
    else:
        arrays["codebook"] = book.books
    for name, array in arrays.items():
        tx.segment(name).append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def load_preview(store: Store, about: Description) -> Preview:
    """Return lists and code book as the catalog describes them."""
    dimension = about.space.padded
    try:
        router = Router.load(store.read_segment("router"), about.lists, dimension)
        radii = store.read_segment("radii").view(np.float32).reshape(about.lists)
        if about.coding == "pq":
            books = store.read_segment("codebook").view(np.float32)
            return Preview(router, ProductBook(books.reshape(about.book_bytes, -1, CODES_PER_BOOK)), radii)
        eight, four, two, one, axes = store.read_segment("book").view(np.int64).tolist()
        raw = store.read_segment("rotation")
        rotation = raw.view(np.int64) if axes == 1 else raw.view(np.float32).reshape(dimension, dimension)
        book = CodeBook(
            rotation,
            (eight, four, two, one),
            store.read_segment("alpha").view(np.float32).reshape(eight + four + two + one),
            store.read_segment("share").view(np.float32).reshape(dimension),
            float(store.read_segment("unit").view(np.float64)[0]),
            store.read_segment("ratios").view(np.int32).reshape(4),
        )
    except ValueError as error:
        raise CorruptionError(f"{store.path}: the preview is not as described: {error}") from error
    return Preview(router, book, radii)
