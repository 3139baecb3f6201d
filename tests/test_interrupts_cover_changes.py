"""Each public call that changes something, or opens it, is one that no interrupt reaches; or it is named here."""

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import memhier
import memhier.ann
import memhier.ann.decoder
import memhier.recsys
import memhier.recsys.replay
import memhier.recsys.replay.transitions
import memhier.store.store
from memhier import shield

MODULES: tuple[Any, ...] = (
    memhier, memhier.ann, memhier.ann.decoder, memhier.recsys, memhier.recsys.replay,
    memhier.recsys.replay.transitions, memhier.store.store,
)  # fmt: skip
TABLES = "contains forward gradient_norm ids initial_weights optimizer_state stats weights"
READER = "bags embedding embedding_bag found opened pooled rows stats"

READS = {
    "LogitIndex": "choose distribution draw draws_pay envelope is_stale log_prob logits logits_of partition proof_pays "
    "proven_of save scan_pays settle stats topk way with_all_directions",
    "MultiVectorIndex": "blocks contains explain fetch ids push reconstruct search stats",
    "Store": "attach check get keys newer not_writable push read_segment segments",
    "Reader": "begin_read read run stats",
    "Rows": "read read_range",
    "RowLog": "begin_read bytes_above check_values keys",
    "Samples": "bytes_above check_values keys",
    "StoredSamples": "blocks check read",
    "TopKSoftmax": "all_logits bounded_log_prob certified_topk extra_repr forward is_stale log_partition log_prob save "
    "stats topk",
    "VectorReader": "blocks take",
    "ZoomIndex": "blocks contains explain fetch ids push range_search reconstruct search search_iter stats",
    "CarouselBuffer": "empty occupied push stored_ids value",
    "SharedBuffer": "empty sample stats value",
    "ShardedBuffer": "empty sample stats value",
    "SharedLoader": "plan serve start",
    "Embedding": f"{TABLES} extra_repr push",
    "EmbeddingBag": f"{TABLES} extra_repr push",
    "EmbeddingBagCollection": f"{TABLES} extra_repr push",
    "EmbeddingCollection": f"{TABLES} extra_repr push",
    "ShardedEmbeddingBagCollection": f"{TABLES} push",
    "TableReader": f"{READER} embedding_bag_collection embedding_collection ids trained",
    "QuantisedTable": READER,
    "Lookahead": "state_dict stats",
    "Tiered": "push",
    "TransitionBuffer": "stats",
}
"""What changes nothing, by class; of a trained table `forward` borrows rows by calls that are shielded."""

MADE_OF_OTHERS = {
    "MultiVectorIndex": "build compact",
    "ZoomIndex": "build commit compact",
    "TopKSoftmax": "from_linear open sample",
    "LogitIndex": "build",
    "Store": "copy",
    "Lookahead": "close load_state_dict",
    "SharedBuffer": "add checkpoint close feedback forget refresh resize",
    "ShardedBuffer": "close feedback open refresh",
    "SharedLoader": "close",
}
"""What makes one shielded call, or several of which each may be the last."""

OF_A_SHIELDED_CALL = {
    "RowLog": "compact_later reclaim rewrite_sparsest",
    "Samples": "compact_later reclaim rewrite_sparsest",
    "Slab": "attach bytes_for close gather gather_versioned generations parts scatter writing",
    "SegmentWriter": "complete flush info",
    "Staging": "drop finish segment take",
    "Store": "leave stage",
    "Transaction": "check_open discard reserve swap_dropped",
    "VectorReader": "close",
}
"""What the library calls within others, or lends to a thread: parts, which promise nothing by themselves."""


def changing_classes() -> Iterator[type]:
    """Yield the public classes that hold something open, or can be changed for good."""
    found = {getattr(module, name) for module in MODULES for name in module.__all__}
    for each in sorted((each for each in found if inspect.isclass(each)), key=lambda each: each.__qualname__):
        if any(hasattr(each, name) for name in ("close", "commit", "abort", "drop", "refresh")):
            yield each


def is_shielded(call: FunctionType) -> bool:
    return call.__code__.co_filename == shield.__file__


def calls_of(kind: type) -> dict[str, FunctionType]:
    """Return the public methods that this library wrote, by name."""
    calls = {}
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        call = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if isinstance(call, FunctionType) and not name.startswith("_") and call.__module__.startswith("memhier"):
            calls[name] = call
    return calls


@pytest.mark.parametrize("kind", [*changing_classes()], ids=lambda kind: kind.__qualname__)
def test_changes_are_shielded_or_listed(kind: type) -> None:
    listed = set(
        " ".join(lists.get(kind.__name__, "") for lists in (READS, MADE_OF_OTHERS, OF_A_SHIELDED_CALL)).split()
    )
    bare = {name for name, call in calls_of(kind).items() if not is_shielded(call)}
    assert bare - listed == set(), "shield it (memhier.shield), or list it here if it changes nothing"
    assert listed - bare == set(), "listed, but shielded or gone"


def test_the_systems_are_among_them() -> None:
    names = {kind.__name__ for kind in changing_classes()}
    assert names >= {*READS, *MADE_OF_OTHERS, *OF_A_SHIELDED_CALL}
    assert names >= {"ZoomIndex", "LogitIndex", "TopKSoftmax", "Tiered", "Store", "CarouselBuffer", "EmbeddingBag"}
    assert is_shielded(calls_of(memhier.ann.ZoomIndex)["add"])
    assert not is_shielded(calls_of(memhier.ann.ZoomIndex)["search"])
