"""Picks the core at import: the compiled one, or its equal in Python.

``MEMHIER_NATIVE=1`` insists on the compiled core, ``MEMHIER_NATIVE=0`` on Python; unset takes the compiled core if it
can be imported. Every other module reads :data:`core`, which is None when Python stands in.
"""

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

__all__ = ["core", "name"]


def _load_core() -> ModuleType | None:
    wanted = os.environ.get("MEMHIER_NATIVE")
    if wanted not in (None, "0", "1"):
        raise ValueError(f"MEMHIER_NATIVE={wanted!r}: expected 1 (compiled core), 0 (pure Python), or unset")
    if wanted == "0":
        return None
    try:
        return importlib.import_module("memhier_native._core")
    except ImportError as error:
        if wanted == "1":
            raise ImportError(
                f"MEMHIER_NATIVE=1, but the compiled core cannot be imported ({error}); build it with 'make build', "
                "or unset MEMHIER_NATIVE to run in Python"
            ) from error
        return None


if TYPE_CHECKING:
    from memhier_native import _core

    class _Core:
        """The compiled core's classes and functions, so that mypy checks every call into it."""

        BeladyPolicy = _core.BeladyPolicy
        CodeBook = _core.CodeBook
        CodeLists = _core.CodeLists
        CodeWaves = _core.CodeWaves
        CodedPart = _core.CodedPart
        Coming = _core.Coming
        DecoderCore = _core.DecoderCore
        DirectSlots = _core.DirectSlots
        HashSlots = _core.HashSlots
        IdMap = _core.IdMap
        IndexState = _core.IndexState
        LFUPolicy = _core.LFUPolicy
        LRUPolicy = _core.LRUPolicy
        ListRouting = _core.ListRouting
        MemoryArrays = _core.MemoryArrays
        PageReader = _core.PageReader
        PageRows = _core.PageRows
        PostingRequest = _core.PostingRequest
        PendingRead = _core.PendingRead
        PlacementArrays = _core.PlacementArrays
        ProductLists = _core.ProductLists
        QuerySpace = _core.QuerySpace
        RankRequest = _core.RankRequest
        RankResult = _core.RankResult
        S3FIFOPolicy = _core.S3FIFOPolicy
        ScanLimits = _core.ScanLimits
        ScanQueries = _core.ScanQueries
        ScanResult = _core.ScanResult
        SearchEffort = _core.SearchEffort
        SearchOutput = _core.SearchOutput
        SearchRequest = _core.SearchRequest
        StackDistances = _core.StackDistances
        StoredLists = _core.StoredLists
        StoredRows = _core.StoredRows
        UpdatedRows = _core.UpdatedRows
        WavePart = _core.WavePart
        allow_words: Final = staticmethod(_core.allow_words)
        are_among: Final = staticmethod(_core.are_among)
        belady_hits: Final = staticmethod(_core.belady_hits)
        code_scan: Final = staticmethod(_core.code_scan)
        code_max_sims: Final = staticmethod(_core.code_max_sims)
        crc32c: Final = staticmethod(_core.crc32c)
        crc32c_by_table: Final = staticmethod(_core.crc32c_by_table)
        crc32c_pages: Final = staticmethod(_core.crc32c_pages)
        distances: Final = staticmethod(_core.distances)
        draw_distinct: Final = staticmethod(_core.draw_distinct)
        draw_outside: Final = staticmethod(_core.draw_outside)
        embedding_distinct: Final = staticmethod(_core.embedding_distinct)
        embedding_pool: Final = staticmethod(_core.embedding_pool)
        embedding_take_steps: Final = staticmethod(_core.embedding_take_steps)
        embedding_update: Final = staticmethod(_core.embedding_update)
        end_step: Final = staticmethod(_core.end_step)
        exact_max_sims: Final = staticmethod(_core.exact_max_sims)
        fence: Final = staticmethod(_core.fence)
        hash_words: Final = staticmethod(_core.hash_words)
        list_max_sims: Final = staticmethod(_core.list_max_sims)
        locate: Final = staticmethod(_core.locate)
        nearest_rows: Final = staticmethod(_core.nearest_rows)
        next_uses: Final = staticmethod(_core.next_uses)
        pq_scan: Final = staticmethod(_core.pq_scan)
        prune_links: Final = staticmethod(_core.prune_links)
        reach_lists: Final = staticmethod(_core.reach_lists)
        runs_with: Final = staticmethod(_core.runs_with)
        sum_tree_draw: Final = staticmethod(_core.sum_tree_draw)
        sum_tree_set: Final = staticmethod(_core.sum_tree_set)
        turn_rows: Final = staticmethod(_core.turn_rows)
        walk_lists: Final = staticmethod(_core.walk_lists)


core: "_Core | None" = cast(Any, _load_core())
"""The compiled core, or None when Python stands in for it."""

name: str = "python" if core is None else "native"
"""``"native"`` or ``"python"``."""
