"""
memhier's compiled core: batched page reads and the kernels that follow them.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy
import numpy.typing
from numpy.typing import NDArray

def allow_words(
    *,
    allowed: numpy.typing.NDArray[Any] | memoryview,
    words: int,
    ends: numpy.typing.NDArray[numpy.int64] | None,
    bits: numpy.typing.NDArray[numpy.uint64],
    counts: numpy.typing.NDArray[numpy.int64],
) -> int: ...

class BeladyPolicy:
    def __init__(self, *, capacity: int, half_life: int) -> None: ...
    def announce(self, keys: numpy.typing.NDArray[numpy.int64]) -> int: ...
    def awaited(self, *, after: int) -> bytes: ...
    def withdraw(self) -> None: ...
    def access(
        self,
        *,
        keys: numpy.typing.NDArray[numpy.int64],
        pinned: numpy.typing.NDArray[numpy.int64],
        hit: numpy.typing.NDArray[numpy.bool_],
    ) -> bytes | int: ...
    def advance(self) -> tuple[bytes, bytes, bytes]: ...
    def expire(self) -> bytes: ...
    def replay(
        self, *, keys: numpy.typing.NDArray[numpy.int64], lookahead: int, hit: numpy.typing.NDArray[numpy.bool_]
    ) -> None: ...
    def discard(self, keys: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: int) -> bool: ...
    @property
    def pending(self) -> int: ...
    @property
    def idle(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

def runs_with(
    *,
    words: numpy.typing.NDArray[numpy.uint64],
    starts: numpy.typing.NDArray[numpy.int64],
    found: numpy.typing.NDArray[numpy.uint64],
) -> int: ...

class ScanQueries:
    def __init__(
        self,
        *,
        queries: numpy.typing.NDArray[numpy.float32],
        probes: numpy.typing.NDArray[numpy.int64],
        most: numpy.typing.NDArray[numpy.float32],
        inner: numpy.typing.NDArray[numpy.float32] | None,
    ) -> None: ...

class CodeLists:
    def __init__(
        self, *, centroids: numpy.typing.NDArray[numpy.uint16], radii: numpy.typing.NDArray[numpy.float32]
    ) -> None: ...

class CodeBook:
    def __init__(
        self,
        *,
        dimensions: numpy.typing.NDArray[numpy.int64],
        alpha: numpy.typing.NDArray[numpy.float32],
        unit: float,
        ratios: numpy.typing.NDArray[numpy.int32],
    ) -> None: ...

class CodedPart:
    def __init__(
        self,
        *,
        starts: numpy.typing.NDArray[numpy.int64],
        codes: numpy.typing.NDArray[numpy.uint8],
        numbers: numpy.typing.NDArray[numpy.uint16],
        allowed: numpy.typing.NDArray[numpy.uint64] | None,
    ) -> None: ...

class ScanLimits:
    def __init__(self, *, k: int, eps: float, least: int, gap: float, clear: float, border: float) -> None: ...

class ScanResult:
    def __init__(
        self,
        *,
        positions: numpy.typing.NDArray[numpy.int64],
        lower: numpy.typing.NDArray[numpy.float32],
        estimates: numpy.typing.NDArray[numpy.float32],
        counts: numpy.typing.NDArray[numpy.int64],
        thresholds: numpy.typing.NDArray[numpy.float32],
        tally: numpy.typing.NDArray[numpy.void],
        ids: numpy.typing.NDArray[numpy.int64] | None,
    ) -> None: ...

def code_scan(
    *,
    queries: ScanQueries,
    lists: CodeLists,
    book: CodeBook,
    parts: Sequence[CodedPart],
    limits: ScanLimits,
    result: ScanResult,
    instructions: int = 2,
) -> None: ...

class WavePart:
    def __init__(
        self,
        *,
        starts: numpy.typing.NDArray[numpy.int64],
        stops: numpy.typing.NDArray[numpy.int64],
        shifts: numpy.typing.NDArray[numpy.int64],
        codes: numpy.typing.NDArray[numpy.uint8],
        numbers: numpy.typing.NDArray[numpy.uint16],
        ids: numpy.typing.NDArray[numpy.int64],
        written: int,
        allowed: numpy.typing.NDArray[numpy.uint64] | None,
    ) -> None: ...

class CodeWaves:
    def __init__(
        self, *, queries: ScanQueries, lists: CodeLists, book: CodeBook, limits: ScanLimits, limit: int
    ) -> None: ...
    def ahead(self, *, first: int, window: int, total: int, counts: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def scan(
        self,
        *,
        parts: Sequence[WavePart],
        lists: numpy.typing.NDArray[numpy.int64],
        counts: numpy.typing.NDArray[numpy.int64],
    ) -> None: ...
    def finish(self, *, result: ScanResult) -> None: ...

def crc32c(*, data: numpy.typing.NDArray[Any] | memoryview, value: int) -> int: ...
def crc32c_by_table(*, data: numpy.typing.NDArray[Any] | memoryview, value: int) -> int:
    """
    The path of machines without SSE4.2, for tests on machines that have it.
    """

def crc32c_pages(*, data: numpy.typing.NDArray[Any] | memoryview, out: numpy.typing.NDArray[numpy.uint32]) -> None: ...
def fence() -> None: ...

class DecoderCore:
    def __init__(
        self,
        *,
        projection: tuple[
            numpy.typing.NDArray[numpy.float32],
            numpy.typing.NDArray[numpy.float32],
            numpy.typing.NDArray[numpy.float32],
            int,
        ],
        blocks: tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.float32], int] | None,
        codes: tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.float32]] | None,
        graph: tuple[
            numpy.typing.NDArray[numpy.uint32],
            numpy.typing.NDArray[numpy.float32],
            numpy.typing.NDArray[numpy.float32],
            numpy.typing.NDArray[numpy.int64],
            numpy.typing.NDArray[numpy.uint32],
        ]
        | None,
        exact: tuple[
            numpy.typing.NDArray[Any] | memoryview,
            int,
            numpy.typing.NDArray[numpy.float32],
            numpy.typing.NDArray[numpy.float32],
        ]
        | None,
        digits: tuple[
            numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint32], numpy.typing.NDArray[numpy.float32]
        ]
        | None,
    ) -> None: ...
    def preview(
        self,
        *,
        hidden: numpy.typing.NDArray[numpy.float32],
        limit: int,
        coarse: tuple[int, int],
        values: numpy.typing.NDArray[numpy.float32],
        indices: numpy.typing.NDArray[numpy.int64],
        rounding: tuple[float, float] = (0.0, 0.0),
        proven: numpy.typing.NDArray[numpy.uint8] | None = None,
        partition: numpy.typing.NDArray[numpy.float64] | None = None,
        interval: bool = False,
        inverse: float = 1.0,
        variance: float = 0.0,
        allowed: numpy.typing.NDArray[numpy.uint64] | None = None,
    ) -> int: ...
    def candidates(
        self,
        *,
        hidden: numpy.typing.NDArray[numpy.float32],
        coarse: tuple[int, int],
        rows: numpy.typing.NDArray[numpy.int64],
        keys: numpy.typing.NDArray[numpy.float32],
        left: numpy.typing.NDArray[numpy.float32],
        coordinates: bool = False,
        bounds: bool = False,
        sums: numpy.typing.NDArray[numpy.float64] | None = None,
        inverse: float = 1.0,
        variance: float = 0.0,
        allowed: numpy.typing.NDArray[numpy.uint64] | None = None,
    ) -> int: ...
    def walk(
        self,
        *,
        hidden: numpy.typing.NDArray[numpy.float32],
        near: tuple[int, int, int],
        radius: float = float("inf"),
        far: tuple[int, int, int] = (0, 0, 0),
        far_radius: float = 0.0,
        values: numpy.typing.NDArray[numpy.float32],
        indices: numpy.typing.NDArray[numpy.int64],
        distances: numpy.typing.NDArray[numpy.float32] | None = None,
        tally: numpy.typing.NDArray[numpy.int64] | None = None,
        allowed: numpy.typing.NDArray[numpy.uint64] | None = None,
    ) -> int: ...
    def listed(
        self,
        *,
        hidden: numpy.typing.NDArray[numpy.float32],
        allowed: numpy.typing.NDArray[numpy.uint64] | None,
        values: numpy.typing.NDArray[numpy.float32],
        indices: numpy.typing.NDArray[numpy.int64],
        rounding: tuple[float, float] = (0.0, 0.0),
        proven: numpy.typing.NDArray[numpy.uint8] | None = None,
    ) -> int: ...
    def prove(
        self,
        *,
        hidden: numpy.typing.NDArray[numpy.float32],
        logits: numpy.typing.NDArray[numpy.float32],
        rounding: tuple[float, float],
        values: numpy.typing.NDArray[numpy.float32],
        indices: numpy.typing.NDArray[numpy.int64],
        proven: numpy.typing.NDArray[numpy.uint8],
    ) -> int: ...
    def envelope(
        self,
        *,
        hidden: numpy.typing.NDArray[numpy.float32],
        shape: tuple[float, float],
        out: numpy.typing.NDArray[numpy.int64] | None,
        rows: numpy.typing.NDArray[numpy.int64],
        logits: numpy.typing.NDArray[numpy.float32],
        ends: numpy.typing.NDArray[numpy.float64],
    ) -> int: ...
    def draw(
        self,
        *,
        hidden: numpy.typing.NDArray[numpy.float32],
        shape: tuple[float, float],
        rule: tuple[float, float, float, float, float],
        temperature: float,
        rounding: float,
        stages: numpy.typing.NDArray[numpy.int64],
        seeds: numpy.typing.NDArray[numpy.uint64],
        out: numpy.typing.NDArray[numpy.int64] | None,
        scores: numpy.typing.NDArray[numpy.float64] | None,
        exchange: tuple[
            numpy.typing.NDArray[numpy.int64],
            numpy.typing.NDArray[numpy.float32],
            numpy.typing.NDArray[numpy.float64],
            Callable,
        ]
        | None,
        drawn: numpy.typing.NDArray[numpy.int64],
        stays: numpy.typing.NDArray[numpy.uint8],
    ) -> int: ...
    def keep(self, *, calls: int, candidates: int, draws: int) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...

def distances(
    *,
    queries: numpy.typing.NDArray[numpy.float32],
    rows: numpy.typing.NDArray[Any],
    dtype: int,
    metric: int,
    query_of_row: numpy.typing.NDArray[numpy.int32] | None,
    out: numpy.typing.NDArray[numpy.float32],
    portable: bool = False,
) -> None:
    """portable: half precision as on machines without F16C, for tests."""

class UpdatedRows:
    def __init__(
        self,
        *,
        rule: int,
        slab: numpy.typing.NDArray[numpy.float32],
        slots: numpy.typing.NDArray[numpy.int64],
        tables: numpy.typing.NDArray[numpy.int64],
        numbers: numpy.typing.NDArray[numpy.float32],
    ) -> None: ...

def embedding_distinct(
    *,
    ids: numpy.typing.NDArray[numpy.int64],
    ends: numpy.typing.NDArray[numpy.int64],
    bases: numpy.typing.NDArray[numpy.int64],
    like_torch: bool,
    keys: numpy.typing.NDArray[numpy.int64],
    starts: numpy.typing.NDArray[numpy.int64],
    inverse: numpy.typing.NDArray[numpy.int32],
    order: numpy.typing.NDArray[numpy.int32],
) -> int: ...
def embedding_pool(
    *,
    slab: numpy.typing.NDArray[numpy.float32],
    slots: numpy.typing.NDArray[numpy.int64],
    inverse: numpy.typing.NDArray[numpy.int32],
    begins: numpy.typing.NDArray[numpy.int64],
    targets: numpy.typing.NDArray[numpy.int64],
    tables: numpy.typing.NDArray[numpy.int64],
    out: numpy.typing.NDArray[numpy.float32],
) -> None: ...
def embedding_update(
    *,
    rows: UpdatedRows,
    inverse: numpy.typing.NDArray[numpy.int32],
    order: numpy.typing.NDArray[numpy.int32],
    sources: numpy.typing.NDArray[numpy.int64],
    scales: numpy.typing.NDArray[numpy.float32] | None,
    gradient: numpy.typing.NDArray[numpy.float32],
    steps: numpy.typing.NDArray[numpy.float32],
    roots: numpy.typing.NDArray[numpy.float32],
) -> None: ...
def embedding_take_steps(
    *, rows: UpdatedRows, steps: numpy.typing.NDArray[numpy.float32], roots: numpy.typing.NDArray[numpy.float32]
) -> None: ...
def hash_words(
    *,
    words: numpy.typing.NDArray[numpy.uint8],
    ends: numpy.typing.NDArray[numpy.int64],
    hashes: numpy.typing.NDArray[numpy.int64],
) -> None: ...

class IdMap:
    def __init__(
        self,
        *,
        ids: numpy.typing.NDArray[numpy.int64],
        last: numpy.typing.NDArray[numpy.uint32],
        uses: numpy.typing.NDArray[numpy.uint32],
        cells: numpy.typing.NDArray[numpy.uint8],
        changed: numpy.typing.NDArray[numpy.uint8],
        numbers: numpy.typing.NDArray[numpy.int64],
        capacity: int,
        admit_after: int,
        expire_after: int,
        evict: int,
        pending: int,
    ) -> None: ...
    def map(
        self,
        *,
        ids: numpy.typing.NDArray[numpy.int64],
        slots: numpy.typing.NDArray[numpy.int64],
        added: numpy.typing.NDArray[numpy.int64],
        places: numpy.typing.NDArray[numpy.int64],
    ) -> int: ...
    def find(self, *, ids: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def resize(
        self,
        *,
        ids: numpy.typing.NDArray[numpy.int64],
        last: numpy.typing.NDArray[numpy.uint32],
        uses: numpy.typing.NDArray[numpy.uint32],
        changed: numpy.typing.NDArray[numpy.uint8],
    ) -> None: ...
    def begin(self, frames: int) -> None: ...
    def undo(self) -> None: ...
    def rewind(self) -> None: ...
    def advance(self) -> None: ...
    def drop(self) -> None: ...
    def reindex(self) -> bool: ...
    def frames(self) -> int: ...
    def bytes(self) -> int: ...
    def last_bytes(self) -> int: ...

def prune_links(
    *,
    rows: numpy.typing.NDArray[numpy.float32],
    numbers: numpy.typing.NDArray[numpy.int64],
    candidates: numpy.typing.NDArray[numpy.int64],
    inner: bool,
    links: numpy.typing.NDArray[numpy.uint32],
) -> None: ...
def walk_lists(
    *,
    queries: numpy.typing.NDArray[numpy.float32],
    rows: numpy.typing.NDArray[numpy.uint16],
    links: numpy.typing.NDArray[numpy.int32],
    seeds: numpy.typing.NDArray[numpy.int32],
    sight: int,
    nearest: numpy.typing.NDArray[numpy.int64],
) -> None: ...
def reach_lists(*, links: numpy.typing.NDArray[numpy.int32], reached: numpy.typing.NDArray[numpy.uint8]) -> None: ...
def list_max_sims(
    *,
    products: numpy.typing.NDArray[numpy.float32],
    lists: numpy.typing.NDArray[numpy.uint16],
    errors: numpy.typing.NDArray[numpy.uint8],
    lows: numpy.typing.NDArray[numpy.int64],
    highs: numpy.typing.NDArray[numpy.int64],
    out: numpy.typing.NDArray[numpy.float32],
) -> None: ...
def code_max_sims(
    *,
    products: numpy.typing.NDArray[numpy.float32],
    lists: numpy.typing.NDArray[numpy.uint16],
    errors: numpy.typing.NDArray[numpy.uint8],
    lows: numpy.typing.NDArray[numpy.int64],
    highs: numpy.typing.NDArray[numpy.int64],
    codes: numpy.typing.NDArray[numpy.uint8],
    scales: numpy.typing.NDArray[numpy.uint8],
    chunks: numpy.typing.NDArray[numpy.int64],
    alpha: numpy.typing.NDArray[numpy.float32],
    levels: numpy.typing.NDArray[numpy.float32],
    heads: numpy.typing.NDArray[numpy.float32],
    out: numpy.typing.NDArray[numpy.float32],
) -> None: ...
def exact_max_sims(
    *,
    query: numpy.typing.NDArray[numpy.float32],
    tokens: numpy.typing.NDArray[Any] | memoryview,
    dtype: int,
    lows: numpy.typing.NDArray[numpy.int64],
    highs: numpy.typing.NDArray[numpy.int64],
    out: numpy.typing.NDArray[numpy.float32],
) -> None: ...
def nearest_rows(
    *,
    queries: numpy.typing.NDArray[numpy.float32],
    rows: numpy.typing.NDArray[numpy.uint16],
    nearest: numpy.typing.NDArray[numpy.int64],
    among: numpy.typing.NDArray[numpy.int64] | None = None,
) -> None: ...
def next_uses(*, keys: numpy.typing.NDArray[numpy.int64], next: numpy.typing.NDArray[numpy.uint32]) -> None: ...
def belady_hits(
    *, next: numpy.typing.NDArray[numpy.uint32], capacity: int, hit: numpy.typing.NDArray[numpy.bool_]
) -> None: ...

class StackDistances:
    def __init__(self) -> None: ...
    def access(
        self, *, keys: numpy.typing.NDArray[numpy.int64], distance: numpy.typing.NDArray[numpy.int64]
    ) -> None: ...
    @property
    def memory_bytes(self) -> int: ...

def are_among(
    *,
    pages: numpy.typing.NDArray[numpy.int64],
    others: numpy.typing.NDArray[numpy.int64],
    found: numpy.typing.NDArray[numpy.bool_],
) -> None: ...
def locate(
    *,
    keys: numpy.typing.NDArray[numpy.int64],
    places: numpy.typing.NDArray[numpy.int64],
    handles: numpy.typing.NDArray[numpy.int32],
    files: numpy.typing.NDArray[numpy.int32],
    offsets: numpy.typing.NDArray[numpy.int64],
) -> bool: ...

class LRUPolicy:
    def __init__(self, capacity: int) -> None: ...
    def access(
        self,
        *,
        keys: numpy.typing.NDArray[numpy.int64],
        pinned: numpy.typing.NDArray[numpy.int64],
        hit: numpy.typing.NDArray[numpy.bool_],
    ) -> bytes | int: ...
    def replay(self, *, keys: numpy.typing.NDArray[numpy.int64], hit: numpy.typing.NDArray[numpy.bool_]) -> None: ...
    def discard(self, keys: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: int) -> bool: ...
    @property
    def memory_bytes(self) -> int: ...

class LFUPolicy:
    def __init__(self, capacity: int) -> None: ...
    def access(
        self,
        *,
        keys: numpy.typing.NDArray[numpy.int64],
        pinned: numpy.typing.NDArray[numpy.int64],
        hit: numpy.typing.NDArray[numpy.bool_],
    ) -> bytes | int: ...
    def replay(self, *, keys: numpy.typing.NDArray[numpy.int64], hit: numpy.typing.NDArray[numpy.bool_]) -> None: ...
    def discard(self, keys: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: int) -> bool: ...
    @property
    def memory_bytes(self) -> int: ...

class S3FIFOPolicy:
    def __init__(self, capacity: int) -> None: ...
    def access(
        self,
        *,
        keys: numpy.typing.NDArray[numpy.int64],
        pinned: numpy.typing.NDArray[numpy.int64],
        hit: numpy.typing.NDArray[numpy.bool_],
    ) -> bytes | int: ...
    def replay(self, *, keys: numpy.typing.NDArray[numpy.int64], hit: numpy.typing.NDArray[numpy.bool_]) -> None: ...
    def discard(self, keys: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: int) -> bool: ...
    @property
    def memory_bytes(self) -> int: ...

class ProductLists:
    def __init__(
        self,
        *,
        centroids: numpy.typing.NDArray[numpy.uint16],
        starts: numpy.typing.NDArray[numpy.int64],
        codes: numpy.typing.NDArray[numpy.uint8],
        codebook: numpy.typing.NDArray[numpy.float32],
    ) -> None: ...

def pq_scan(
    *,
    queries: numpy.typing.NDArray[numpy.float32],
    probes: numpy.typing.NDArray[numpy.int64],
    lists: ProductLists,
    inner: bool,
    positions: numpy.typing.NDArray[numpy.int64],
    distances: numpy.typing.NDArray[numpy.float32],
) -> int: ...

class PageRows:
    def __init__(
        self,
        *,
        file: int,
        ids: numpy.typing.NDArray[numpy.uint32] | numpy.typing.NDArray[numpy.int64] | None,
        first: int,
        rows: int,
        allowed: numpy.typing.NDArray[numpy.uint64] | None,
    ) -> None: ...

class RankRequest:
    def __init__(
        self,
        *,
        queries: numpy.typing.NDArray[numpy.float32],
        type: int,
        metric: int,
        row_bytes: int,
        first: numpy.typing.NDArray[numpy.int64],
        files: numpy.typing.NDArray[numpy.int32],
        offsets: numpy.typing.NDArray[numpy.int64],
        lower: numpy.typing.NDArray[numpy.float32],
        ids: numpy.typing.NDArray[numpy.int64],
        thresholds: numpy.typing.NDArray[numpy.float32],
        k: int,
        first_round: int,
        max_reads: int,
        deadline: float,
    ) -> None: ...

class RankResult:
    def __init__(
        self,
        *,
        ids: numpy.typing.NDArray[numpy.int64],
        distances: numpy.typing.NDArray[numpy.float32],
        files: numpy.typing.NDArray[numpy.int32],
        offsets: numpy.typing.NDArray[numpy.int64],
        tally: numpy.typing.NDArray[numpy.void],
        rounds: numpy.typing.NDArray[numpy.int32] | None,
    ) -> None: ...

class PostingRequest:
    def __init__(
        self,
        *,
        file: int,
        end: int,
        directory: numpy.typing.NDArray[numpy.uint64],
        count: int,
        items: numpy.typing.NDArray[Any] | memoryview,
        ends: Sequence[int],
        filters: Sequence[int],
        floats: bool,
        start: int,
        rows: int,
    ) -> None: ...

class PageReader:
    def __init__(self, *, engine: str, depth: int, contexts: int, run_pages: int) -> None: ...
    def add(
        self,
        *,
        fd: int,
        direct: bool,
        drops_cache: bool,
        length: int,
        checksums: numpy.typing.NDArray[numpy.uint32] | None,
        file: object,
        source: object | None = None,
        held: bool = False,
    ) -> int: ...
    def extend(
        self,
        *,
        handle: int,
        direct: bool,
        drops_cache: bool,
        length: int,
        checksums: numpy.typing.NDArray[numpy.uint32] | None,
    ) -> None: ...
    def remove(self, handle: int) -> None: ...
    def hold_pages(self, pages: int) -> None: ...
    def read(
        self,
        *,
        files: int | numpy.typing.NDArray[numpy.int32],
        offsets: numpy.typing.NDArray[numpy.int64],
        length: int,
        out: numpy.typing.NDArray[Any] | memoryview,
        latency: numpy.typing.NDArray[numpy.float32] | None = None,
        tally: numpy.typing.NDArray[numpy.void] | None = None,
    ) -> tuple[str, object, int, int, int] | None: ...
    def rank(
        self,
        *,
        request: RankRequest,
        result: RankResult,
        workspace: numpy.typing.NDArray[Any] | memoryview,
        hot_keys: numpy.typing.NDArray[numpy.int64],
        hot_pages: numpy.typing.NDArray[Any] | memoryview,
        page_rows: Sequence[PageRows],
        per_page: int,
        tally: numpy.typing.NDArray[numpy.void],
    ) -> tuple[str, object, int, int, int] | None: ...
    def search(
        self,
        *,
        states: Sequence[IndexState],
        requests: Sequence[SearchRequest],
        result: SearchOutput,
        workspace: numpy.typing.NDArray[Any] | memoryview,
        tally: numpy.typing.NDArray[numpy.void],
    ) -> tuple[str, object, int, int, int] | None: ...
    def search_plainly(
        self,
        *,
        state: IndexState,
        request: SearchRequest,
        query: numpy.typing.NDArray[numpy.float32],
        ids: numpy.typing.NDArray[numpy.int64],
        distances: numpy.typing.NDArray[numpy.float32],
        workspace: numpy.typing.NDArray[Any] | memoryview,
        numbers: numpy.typing.NDArray[numpy.int64],
    ) -> tuple[str, object, int, int, int] | None: ...
    def mark_rows(
        self, *, request: PostingRequest, words: numpy.typing.NDArray[numpy.uint64]
    ) -> tuple[str, object, int, int, int] | None: ...
    def counters(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    @property
    def engine(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def planned_bytes(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...

class PendingRead:
    def __init__(
        self,
        *,
        reader: PageReader,
        files: numpy.typing.NDArray[numpy.int32],
        offsets: numpy.typing.NDArray[numpy.int64],
        length: int,
        out: numpy.typing.NDArray[Any] | memoryview,
    ) -> None: ...
    def done(self) -> bool: ...
    def wait(self) -> tuple[str, object, int, int, int] | None: ...
    @property
    def seconds(self) -> float: ...

class QuerySpace:
    def __init__(
        self,
        *,
        metric: int,
        dimension: int,
        scale: float,
        matrix: numpy.typing.NDArray[numpy.float32] | None,
        order: numpy.typing.NDArray[numpy.int64] | None,
        share: numpy.typing.NDArray[numpy.float32] | None,
        errors: numpy.typing.NDArray[numpy.float32] | None,
        usual: float,
    ) -> None: ...

class ListRouting:
    def __init__(
        self, *, links: numpy.typing.NDArray[numpy.int32] | None, seeds: numpy.typing.NDArray[numpy.int32] | None
    ) -> None: ...

class StoredRows:
    def __init__(
        self,
        *,
        type: int,
        row_bytes: int,
        per_page: int,
        hot_keys: numpy.typing.NDArray[numpy.int64],
        hot_pages: numpy.typing.NDArray[Any] | memoryview,
    ) -> None: ...

class StoredLists:
    def __init__(
        self,
        *,
        file: int,
        starts: numpy.typing.NDArray[numpy.int64],
        offsets: numpy.typing.NDArray[numpy.int64],
        block_bytes: int,
        id_bytes: int,
        allowed: numpy.typing.NDArray[numpy.uint64] | None,
    ) -> None: ...

class IndexState:
    @overload
    def __init__(
        self,
        *,
        space: QuerySpace,
        lists: CodeLists,
        book: CodeBook,
        parts: Sequence[CodedPart],
        stored_lists: Sequence[StoredLists],
        wave_pages: int,
        routing: ListRouting,
        stored: StoredRows,
        page_rows: Sequence[PageRows],
    ) -> None: ...
    @overload
    def __init__(
        self, *, whole: IndexState, bitmaps: Sequence[numpy.typing.NDArray[numpy.uint64]], narrowed: bool
    ) -> None: ...
    @property
    def left(self) -> int: ...
    @property
    def held(self) -> int: ...

class SearchEffort:
    def __init__(
        self,
        *,
        k: int,
        eps: float,
        least: int,
        gap: float,
        clear: float,
        border: float,
        most: int,
        usual: int,
        most_times: int,
        limit: int,
        first_round: int,
        max_reads: int,
        deadline: float,
        loss: float,
        put_off: bool,
    ) -> None: ...

class SearchRequest:
    def __init__(
        self,
        *,
        queries: numpy.typing.NDArray[numpy.float32],
        routes: numpy.typing.NDArray[numpy.int64],
        effort: SearchEffort,
        radius: numpy.typing.NDArray[numpy.float32] | None,
    ) -> None: ...

class SearchOutput:
    def __init__(
        self,
        *,
        ids: numpy.typing.NDArray[numpy.int64],
        distances: numpy.typing.NDArray[numpy.float32],
        files: numpy.typing.NDArray[numpy.int32],
        offsets: numpy.typing.NDArray[numpy.int64],
        scanned: numpy.typing.NDArray[numpy.void],
        admitted: numpy.typing.NDArray[numpy.int64],
        ranked: numpy.typing.NDArray[numpy.void],
    ) -> None: ...

class HashSlots:
    def __init__(self, capacity: int) -> None: ...
    def size(self) -> int: ...
    def reserved(self) -> int: ...
    def reserve(self, batch: int) -> None: ...
    def find(self, *, keys: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def insert(self, *, keys: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64]) -> int: ...
    def erase(self, *, keys: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def unique(
        self, *, keys: numpy.typing.NDArray[numpy.int64], inverse: numpy.typing.NDArray[numpy.int64]
    ) -> NDArray[numpy.int64]: ...
    def unique_find(
        self, *, keys: numpy.typing.NDArray[numpy.int64], inverse: numpy.typing.NDArray[numpy.int64]
    ) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]: ...
    def keys_of(self, *, slots: numpy.typing.NDArray[numpy.int64], keys: numpy.typing.NDArray[numpy.int64]) -> int: ...
    def items(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]: ...
    def grow(self, capacity: int) -> None: ...
    @staticmethod
    def bytes_for(capacity: int, batch: int) -> int: ...

class DirectSlots:
    def __init__(self, capacity: int, key_space: int) -> None: ...
    def size(self) -> int: ...
    def reserved(self) -> int: ...
    def reserve(self, batch: int) -> None: ...
    def find(self, *, keys: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def insert(self, *, keys: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64]) -> int: ...
    def erase(self, *, keys: numpy.typing.NDArray[numpy.int64], slots: numpy.typing.NDArray[numpy.int64]) -> None: ...
    def unique(
        self, *, keys: numpy.typing.NDArray[numpy.int64], inverse: numpy.typing.NDArray[numpy.int64]
    ) -> NDArray[numpy.int64]: ...
    def unique_find(
        self, *, keys: numpy.typing.NDArray[numpy.int64], inverse: numpy.typing.NDArray[numpy.int64]
    ) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]: ...
    def keys_of(self, *, slots: numpy.typing.NDArray[numpy.int64], keys: numpy.typing.NDArray[numpy.int64]) -> int: ...
    def items(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]: ...
    @staticmethod
    def bytes_for(capacity: int, key_space: int, batch: int) -> int: ...

def sum_tree_set(
    *,
    leaves: numpy.typing.NDArray[numpy.float32],
    sums: numpy.typing.NDArray[numpy.float64],
    least: numpy.typing.NDArray[numpy.float32],
    places: numpy.typing.NDArray[numpy.int64],
    values: numpy.typing.NDArray[numpy.float32],
) -> None: ...
def sum_tree_draw(
    *,
    leaves: numpy.typing.NDArray[numpy.float32],
    sums: numpy.typing.NDArray[numpy.float64],
    least: numpy.typing.NDArray[numpy.float32],
    uniforms: numpy.typing.NDArray[numpy.float64],
    places: numpy.typing.NDArray[numpy.int64],
    taking: bool,
) -> None: ...

class PlacementArrays:
    def __init__(
        self,
        *,
        planned: numpy.typing.NDArray[numpy.int64],
        visible: numpy.typing.NDArray[numpy.int64],
        swapped: numpy.typing.NDArray[numpy.int64],
        slot_of: numpy.typing.NDArray[numpy.int32],
        labels: numpy.typing.NDArray[numpy.int32],
        ids: numpy.typing.NDArray[numpy.int64],
        dirty: numpy.typing.NDArray[numpy.bool_],
        per_row: int,
        leaving: dict,
    ) -> None: ...

class MemoryArrays:
    def __init__(
        self,
        *,
        flat: numpy.typing.NDArray[Any] | memoryview,
        generations: numpy.typing.NDArray[numpy.uint32],
        values_at: int,
        labels_at: int,
        ids_at: int,
    ) -> None: ...

class Coming:
    def __init__(
        self,
        *,
        slots: numpy.typing.NDArray[numpy.int64],
        positions: numpy.typing.NDArray[numpy.int64],
        rows: numpy.typing.NDArray[Any] | memoryview,
    ) -> None: ...

def end_step(
    *,
    placement: PlacementArrays,
    memory: MemoryArrays,
    coming: Coming | None,
    next: Coming,
    step: int,
    owner: object,
    after: dict,
) -> bool: ...
def draw_distinct(
    *, uniforms: numpy.typing.NDArray[numpy.float64], count: int, chosen: numpy.typing.NDArray[numpy.int64]
) -> int: ...
def draw_outside(
    *,
    positions: numpy.typing.NDArray[numpy.int64],
    slot_of: numpy.typing.NDArray[numpy.int32],
    uniforms: numpy.typing.NDArray[numpy.float64],
    chosen: numpy.typing.NDArray[numpy.int64],
) -> int: ...
def turn_rows(
    *,
    vectors: numpy.typing.NDArray[numpy.float32],
    matrix: numpy.typing.NDArray[numpy.float32],
    out: numpy.typing.NDArray[numpy.float32],
) -> None: ...
