"""ZoomIndex: search more vectors than fit in DRAM (Zoom, arXiv 1809.04067)."""

import json
import shutil
import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.build import KIND, VERSION, write_index
from memhier.ann.zoom.calibrate import NEIGHBOURS, TARGET, Calibration
from memhier.ann.zoom.fullview import Fullview, record_dtype, workspace_bytes
from memhier.ann.zoom.preview import Preview
from memhier.ann.zoom.router import Router
from memhier.ann.zoom.scan import CODES_PER_BOOK
from memhier.ann.zoom.space import METRICS, Metric, PreviewSpace
from memhier.budget import parse_bytes
from memhier.errors import ClosedError, CorruptionError, FormatError
from memhier.reader import Reader
from memhier.rows import Rows
from memhier.store import Store, Verify

__all__ = ["SearchResult", "ZoomIndex"]

_CANDIDATE_BYTES = 64  # positions, ids and distances on their way, beside the record itself

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Nearest vectors of each query, nearest first.

    Attributes
    ----------
    ids
        int64 ``[q, k]``; ``[k]`` for a single query.
    distances
        float32, of the same shape: squared Euclidean distance for ``l2``, negative inner product for ``ip``,
        1 - cosine similarity for ``cosine``. Ties stand in the order of their ids.
    stats
        Plain numbers of this call: ``queries``, ``nprobe``, ``scanned`` codes, ``candidates`` ranked exactly, and what
        was read for them: ``reads`` (I/Os), ``pages``, ``bytes``.
    """

    ids: Ints
    distances: Floats
    stats: dict[str, int]


class ZoomIndex:
    """A vector index with a compressed preview in DRAM and the full vectors on SSD.

    A search scans codes in DRAM, reads the most promising full vectors in one submission, and ranks those exactly.
    Make one with :meth:`build` or :meth:`open`. Searches may run from several threads at once.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann import ZoomIndex
    >>> vectors = np.random.default_rng(0).normal(size=(2000, 32)).astype("float32")
    >>> path = tempfile.mkdtemp() + "/index"
    >>> with ZoomIndex.build(path, vectors, dram="2MiB") as index:
    ...     index.search(vectors[7], k=3).ids[0]
    np.int64(7)
    """

    def __init__(self, store: Store, reader: Reader) -> None:
        self._store, self._reader = store, reader
        raw = store.get("index")
        if raw is None:
            raise FormatError(f"{store.path}: the catalog does not describe an index")
        about = json.loads(raw)
        if about["version"] != VERSION:
            raise FormatError(
                f"{store.path}: index format {about['version']}, this memhier reads {VERSION}; build the index again"
            )
        self._count = int(about["count"])
        self._dram = int(about["dram"])
        self._space = PreviewSpace(**about["space"])
        self._effort = Calibration(**about["effort"])
        self._dtype = np.dtype(about["dtype"])
        self._preview = self._load_preview(about["lists"], about["width"])
        self._record_bytes = record_dtype(self._dtype, self.dimension).itemsize
        rows = Rows(store, "vectors", reader)
        if len(rows) != self._count or rows.row_bytes != self._record_bytes:
            raise CorruptionError(f"{store.path}: {len(rows)} records of {rows.row_bytes} bytes, not as described")
        self._fullview = Fullview(rows, self._dtype, self.dimension, self.metric)
        self._closed = False

    @classmethod
    def build(
        cls,
        path: str | PathLike[str],
        vectors: object,
        *,
        ids: object = None,
        metric: Metric = "l2",
        dram: int | str = "64MiB",
        seed: int = 0,
        progress: bool = False,
    ) -> Self:
        """Build an index in the new directory `path` and return it open.

        Nothing appears under `path` as an index before the last step, which is atomic. A build that was killed leaves
        a directory that :meth:`open` refuses and that the next build takes over.

        Parameters
        ----------
        path
            A directory that does not exist yet; its parent does.
        vectors
            Array or memmap ``[n, d]``, or an iterator of such blocks; float32, float16, int8 or uint8 (float64 is
            stored as float32). Read in blocks, never held whole. A build takes DRAM for the codes twice, 30 bytes a
            vector, a training sample of at most 256 MiB twice and some 200 MiB of blocks; and up to three times the
            vectors' size on disk while it runs.
        ids
            Integers ``[n]``, each once; 0 to n - 1 when not given.
        metric
            ``"l2"``, ``"ip"`` (inner product) or ``"cosine"``.
        dram
            What the open index may hold in DRAM, as bytes or text such as ``"64MiB"``. Longer codes, which let a
            search read less for the same recall, are used as far as it allows.
        seed
            Fixes sampling and training; equal input and seed give an equal index.
        progress
            Show a progress bar.

        Raises
        ------
        FileExistsError
            When `path` holds anything already.
        BudgetError
            When `dram` is too small; the message says what would be enough.
        ValueError, TypeError
            When the vectors or ids cannot be indexed. Nothing is left behind.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
        budget = parse_bytes(dram, "dram")
        seed = _check_count("seed", seed, 0, 2**31 - 2, "what faiss takes")
        place = Path(path).absolute()  # whatever directory a source of vectors may change to
        existed = place.exists()
        try:
            with Store.create(place, kind=KIND) as store:
                write_index(store, vectors, ids, metric, budget, seed, progress)
        except BaseException:
            if not existed:
                shutil.rmtree(place, ignore_errors=True)
            raise
        index = cls.open(place)
        reached = index.stats()["calibrated_recall"]
        if reached < TARGET - 0.01:
            warnings.warn(
                f"calibration found recall@{NEIGHBOURS} of {reached:.3f}, short of {TARGET}, on sampled vectors: "
                f"more dram than {dram!r} makes longer codes; search takes nprobe= and candidates=",
                stacklevel=2,
            )
        return index

    @classmethod
    def open(cls, path: str | PathLike[str], *, verify: Verify = "read") -> Self:
        """Open the index at `path` for searching.

        Parameters
        ----------
        path
            A directory made by :meth:`build`.
        verify
            ``"read"`` checks each page of vectors as it is read, ``"open"`` checks the whole index now as well,
            ``"off"`` trusts the disk. Codes and lists are checked at open unless it is ``"off"``.

        Raises
        ------
        FileNotFoundError, FormatError, CorruptionError
            When there is no index at `path`, or it is damaged.
        """
        store = Store.open(Path(path), kind=KIND, verify=verify)
        try:
            reader = Reader()
            try:
                return cls(store, reader)
            except BaseException:
                reader.close()
                raise
        except BaseException:
            store.close()
            raise

    def search(
        self, queries: npt.ArrayLike, k: int, *, candidates: int | None = None, nprobe: int | None = None
    ) -> SearchResult:
        """Return the `k` nearest vectors of each query.

        Parameters
        ----------
        queries
            ``[q, d]``, or ``[d]`` for one; any real dtype, compared as float32.
        k
            Number of neighbours, at most ``len(index)``.
        candidates
            Full vectors read and ranked exactly per query, at least `k`. Default: what gave recall 0.99 on sampled
            vectors at build, in proportion to `k`.
        nprobe
            Inverted lists scanned per query. Default: likewise. More are scanned where these hold fewer than `k`
            vectors. With all lists and all candidates the result is that of exact search.

        Raises
        ------
        ValueError, TypeError
            When the dimension is wrong, a query holds NaN or infinity, or a number is out of range.
        CorruptionError
            When a page read from SSD is not what was written.
        """
        matrix, single = self._check_queries(queries)
        k = _check_count("k", k, 1, self._count, "the number of vectors in the index")
        default = max(self._effort.candidates, -(-k * self._effort.candidates // NEIGHBOURS))
        wanted = min(max(default, k), self._count) if candidates is None else candidates
        wanted = min(_check_count("candidates", wanted, k, None, "nothing"), self._count)
        probed = self._effort.nprobe if nprobe is None else _check_count("nprobe", nprobe, 1, None, "nothing")
        self._check_open()
        probed = min(probed, self._preview.lists)
        tally = np.zeros(3, np.int64)
        ids = np.empty((len(matrix), k), np.int64)
        distances = np.empty((len(matrix), k), np.float32)
        scanned = 0
        per_query = wanted * (self._record_bytes + _CANDIDATE_BYTES) + probed * 8
        block = max(1, workspace_bytes(self._record_bytes) // per_query)
        for start in range(0, len(matrix), block):
            part = matrix[start : start + block]
            positions, seen = self._candidates(part, k, wanted, probed)
            near = self._fullview.rank(part, positions, k, tally)
            ids[start : start + block], distances[start : start + block] = near
            scanned += seen
        stats = {"queries": len(matrix), "nprobe": probed, "scanned": scanned, "candidates": wanted * len(matrix)}
        stats |= dict(zip(("reads", "pages", "bytes"), tally.tolist(), strict=True))
        return SearchResult(ids[0], distances[0], stats) if single else SearchResult(ids, distances, stats)

    def _candidates(self, queries: Floats, k: int, candidates: int, nprobe: int) -> tuple[Ints, int]:
        """Return positions ``[q, candidates]`` from the preview, probing more lists for queries short of `k`."""
        mapped = self._space.queries(queries)
        positions, scanned = self._preview.search(mapped, nprobe, candidates)
        short = np.flatnonzero(positions[:, k - 1] < 0)
        while len(short) and nprobe < self._preview.lists:
            nprobe = min(2 * nprobe, self._preview.lists)
            positions[short], seen = self._preview.search(mapped[short], nprobe, candidates)
            scanned += seen
            short = short[positions[short, k - 1] < 0]
        return positions, scanned

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"ZoomIndex({str(self._store.path)!r}, {self._count} x {self.dimension} {self._dtype}, {self.metric})"

    @property
    def dimension(self) -> int:
        """Dimension of a vector."""
        return self._space.dimension

    @property
    def metric(self) -> Metric:
        """The metric chosen at build."""
        return self._space.metric

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: codes, lists with their centroids, codebook, page checksums, read and work buffers."""
        return (
            self._preview.memory_bytes
            + self._fullview.memory_bytes
            + self._store.memory_bytes
            + self._reader.memory_bytes
            + workspace_bytes(self._record_bytes)
        )

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: sizes, the default effort, and what the reader has done since open."""
        vectors = self._store.segments()["vectors"]
        return {
            "vectors": self._count,
            "dimension": self.dimension,
            "dtype": str(self._dtype),
            "metric": self.metric,
            "lists": self._preview.lists,
            "code_bytes": self._preview.codes.shape[1],
            "memory_bytes": self.memory_bytes,
            "dram": self._dram,
            "vector_bytes": self._count * self.dimension * self._dtype.itemsize,
            "file_bytes": vectors.length,
            "nprobe": self._effort.nprobe,
            "candidates": self._effort.candidates,
            "calibrated_recall": self._effort.recall,
            **self._reader.stats(),
        }

    def check(self) -> list[str]:
        """Read the whole index and return every inconsistency found, empty when there is none."""
        self._check_open()
        return [str(problem) for problem in self._store.check()]

    def close(self) -> None:
        """Release files and memory; further calls raise :class:`ClosedError`. May be called twice."""
        self._closed = True
        self._reader.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ZoomIndex is closed: open it again with ZoomIndex.open")

    def _check_queries(self, queries: npt.ArrayLike) -> tuple[Floats, bool]:
        array = np.asarray(queries)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"queries has dtype {array.dtype}: expected real numbers")
        if array.ndim not in (1, 2) or array.shape[-1] != self.dimension:
            raise ValueError(
                f"queries has shape {array.shape}: expected [q, {self.dimension}] or [{self.dimension}], "
                f"the dimension of the index"
            )
        with np.errstate(over="ignore"):  # reported below, as infinity
            matrix = np.ascontiguousarray(np.atleast_2d(array), dtype=np.float32)
        finite = np.isfinite(matrix).all(axis=1)
        if not finite.all():
            raise ValueError(f"queries row {int(np.argmin(finite))} holds NaN or infinity: every value must be finite")
        return matrix, array.ndim == 1

    def _load_preview(self, lists: int, width: int) -> Preview:
        store, padded = self._store, self._space.padded
        starts = store.read_segment("starts").view(np.int64)
        codes = store.read_segment("codes").reshape(self._count, padded // width)
        codebook = store.read_segment("codebook").view(np.float32).reshape(-1, width, CODES_PER_BOOK)
        if len(starts) != lists + 1 or starts[0] != 0 or starts[-1] != self._count or (np.diff(starts) < 0).any():
            raise CorruptionError(f"{store.path}: the starts of the lists do not describe {lists} lists")
        return Preview(Router.load(store.read_segment("router"), lists, padded), codebook, starts, codes)


def _check_count(name: str, value: object, low: int, high: int | None, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r}: expected an integer")
    if value < low or (high is not None and value > high):
        limit = f"{low} to {high} ({what})" if high is not None else f"at least {low}"
        raise ValueError(f"{name}={value}: expected {limit}")
    return int(value)
