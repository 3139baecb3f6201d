"""A vector store of LlamaIndex on an index on SSD (extra ``llamaindex``).

Examples
--------
>>> import tempfile
>>> from llama_index.core.schema import TextNode
>>> from llama_index.core.vector_stores import VectorStoreQuery
>>> from memhier.ann.llama_index import ZoomVectorStore
>>> store = ZoomVectorStore(tempfile.mkdtemp() + "/store", attributes=["lang"], dram="16MiB", grow_to=1000)
>>> node = TextNode(text="Hello", metadata={"lang": "en"}, embedding=[0.0, 1.0])
>>> [store.add([node])] == [[node.node_id]]
True
>>> store.query(VectorStoreQuery(query_embedding=[0.0, 2.0], similarity_top_k=1)).nodes[0].text
'Hello'
"""

import os
import re
from collections.abc import Sequence
from typing import Any

from memhier.ann.documents import DocumentIndex, comparison
from memhier.lazy import extra_for

with extra_for(__name__):
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
    from llama_index.core.schema import BaseNode
    from llama_index.core.vector_stores.types import (
        BasePydanticVectorStore,
        FilterCondition,
        FilterOperator,
        MetadataFilter,
        MetadataFilters,
        VectorStoreQuery,
        VectorStoreQueryMode,
        VectorStoreQueryResult,
    )
    from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

__all__ = ["ZoomVectorStore"]

_SOURCE = "ref_doc_id"
_SOURCE_TOO = ("doc_id", "document_id")  # other names that LlamaIndex has for it


class ZoomVectorStore(BasePydanticVectorStore):
    """Nodes with vectors on SSD, of which DRAM holds a small preview.

    Changes are durable when a call returns; ``persist`` of a storage context writes nothing more, and the store is
    opened again by its `path`. Similarities are 1 - distance for the metrics ``cosine``, the inner product
    for ``ip``, and 1 / (1 + squared distance) for ``l2``.

    Parameters
    ----------
    path
        The directory of the index: opened if it exists, otherwise made with the first node.
    attributes
        Keys of the metadata by which filters may choose. Values of one key are of one type: number, bool, text or None.
        The id of a node's source document is always one, ``ref_doc_id``.
    **options
        ``metric`` (``"cosine"`` by default), ``dram``, ``grow_to`` and ``seed`` of
        :class:`memhier.ann.documents.DocumentIndex`.
    """

    stores_text: bool = True
    _records: DocumentIndex = PrivateAttr()

    def __init__(self, path: str | os.PathLike[str], *, attributes: Sequence[str] = (), **options: Any) -> None:
        super().__init__()
        self._records = DocumentIndex(path, attributes=[*dict.fromkeys([*attributes, _SOURCE])], **options)

    @classmethod
    def class_name(cls) -> str:
        """Return the name of this class."""
        return "ZoomVectorStore"

    @property
    def client(self) -> DocumentIndex:
        """The :class:`memhier.ann.documents.DocumentIndex`; its ``index`` is the :class:`memhier.ann.ZoomIndex`."""
        return self._records

    def add(self, nodes: Sequence[BaseNode], **options: Any) -> list[str]:
        """Add nodes with their embeddings, and replace those whose ids are there; return the ids."""
        ids = [str(node.node_id) for node in nodes]
        records = [node_to_metadata_dict(node) for node in nodes]
        metadata = [{**node.metadata, _SOURCE: node.ref_doc_id} for node in nodes]
        self._records.put(ids, [node.get_embedding() for node in nodes], records, metadata)
        return ids

    def delete(self, ref_doc_id: str, **options: Any) -> None:
        """Remove all nodes of a source document."""
        self._records.discard_where(comparison(_SOURCE, "==", ref_doc_id))

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **options: Any
    ) -> None:
        """Remove nodes by ids, by filters, or those of these ids that filters choose; without either, none."""
        if filters is not None and (where := self._where(filters)):
            self._records.discard_where(where, node_ids)
        else:
            self._records.discard(node_ids or [])

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Return nodes by ids, by filters, or those of these ids that filters choose; without either, all."""
        where = None if filters is None else self._where(filters) or None
        chosen = self._records.select(where, node_ids)
        return [metadata_dict_to_node(record) for _, record in self._records.get(chosen)]

    def query(self, query: VectorStoreQuery, **options: Any) -> VectorStoreQueryResult:
        """Return the nodes nearest to a vector.

        Parameters
        ----------
        query
            Of the mode ``default`` or ``mmr``, with an embedding. Its filters compare keys in `attributes` with values
            (``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in``, ``nin``, ``is_empty``), joined by and, or, not.
        **options
            Of :meth:`memhier.ann.ZoomIndex.search`, such as ``recall=``; for ``mmr`` also ``mmr_threshold``, and the
            number of nodes to choose from, ``mmr_prefetch_k`` or ``mmr_prefetch_factor`` (4) times the nodes asked for.

        Raises
        ------
        NotImplementedError
            For any other mode or operator.
        """
        if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR) or query.query_embedding is None:
            raise NotImplementedError(
                f"query: mode {query.mode.value!r}, expected 'default' or 'mmr' with a query_embedding"
            )
        if query.node_ids:  # the library gives an empty list for no choice
            raise NotImplementedError("query: node_ids; filter by an attribute instead")
        tests = [self._where(query.filters)] if query.filters is not None else []
        if query.doc_ids is not None:
            tests.append(_of_several(_SOURCE, "in", query.doc_ids))
        where = " and ".join(f"({test})" for test in tests if test) or None
        if query.mode == VectorStoreQueryMode.MMR:
            found = self._unlike(query, where, **options)
        else:
            hits = self._records.search(query.query_embedding, query.similarity_top_k, where, **options)
            found = [(name, record, self._similarity(distance)) for name, record, distance in hits]
        return VectorStoreQueryResult(
            nodes=[metadata_dict_to_node(record) for _, record, _ in found],
            similarities=[similarity for *_, similarity in found],
            ids=[name for name, *_ in found],
        )

    def clear(self) -> None:
        """Remove all nodes."""
        self._records.discard_where(f"{_SOURCE} is null or {_SOURCE} is not null")

    def close(self) -> None:
        """Close the index. May be called twice."""
        self._records.close()

    def _unlike(
        self,
        query: VectorStoreQuery,
        where: str | None,
        mmr_threshold: float | None = None,
        mmr_prefetch_k: int | None = None,
        mmr_prefetch_factor: float = 4.0,
        **options: Any,
    ) -> list[tuple[str, dict[str, Any], float]]:
        """Return ids, records and scores of the nodes by maximal marginal relevance, the best first."""
        k = query.similarity_top_k
        most = max(k, int(k * mmr_prefetch_factor)) if mmr_prefetch_k is None else max(k, mmr_prefetch_k)
        found = {
            name: record for name, record, _ in self._records.search(query.query_embedding, most, where, **options)
        }
        if not found or self._records.index is None:
            return []
        names, threshold = [*found], query.mmr_threshold if mmr_threshold is None else mmr_threshold
        vectors = self._records.index.reconstruct(names).astype(float).tolist()
        scores, chosen = get_top_k_mmr_embeddings(
            query.query_embedding, vectors, similarity_top_k=k, embedding_ids=names, mmr_threshold=threshold
        )
        return [(name, found[name], float(score)) for score, name in zip(scores, chosen, strict=True)]

    def _similarity(self, distance: float) -> float:
        metric = self._records.metric
        return {"cosine": 1 - distance, "ip": -distance}.get(metric, 1 / (1 + abs(distance)))

    def _where(self, filters: MetadataFilters) -> str:
        """Return filters as text, empty for none; a test of a null is false, never unknown."""
        tests = [
            self._where(each) if isinstance(each, MetadataFilters) else self._test(each) for each in filters.filters
        ]
        between = " and " if filters.condition in (None, FilterCondition.AND) else " or "
        joined = between.join(f"({test})" for test in tests if test)
        return f"not ({joined})" if joined and filters.condition == FilterCondition.NOT else joined

    def _test(self, test: MetadataFilter) -> str:
        key, value, operator = test.key, test.value, test.operator
        if key in _SOURCE_TOO and key not in self._records.attributes:
            key = _SOURCE
        if key not in self._records.attributes:
            raise ValueError(f"filters: {key!r} is none of the attributes {self._records.attributes} of this store")
        if operator == FilterOperator.IS_EMPTY:
            index = self._records.index
            is_text = index is not None and index.fields.get(key) == "str"
            return f"{key} is null or {key} == ''" if is_text else f"{key} is null"
        if operator == FilterOperator.IN:
            return _of_several(key, "in", value)
        if operator == FilterOperator.NIN:
            return f"not ({_of_several(key, 'in', value)})"
        if operator == FilterOperator.NE:
            return f"{key} is null or {comparison(key, '!=', value)}"
        if operator == FilterOperator.CONTAINS:
            return f"{key} is not null and {comparison(key, 'contains', value)}"
        if operator == FilterOperator.TEXT_MATCH:
            pattern = re.sub(r"[%_\\]", r"\\\g<0>", str(value))
            return f"{key} is not null and {comparison(key, 'like', f'%{pattern}%')}"
        if operator in (FilterOperator.ANY, FilterOperator.ALL):
            return _of_several(key, f"contains {operator.value}", value)
        if operator.value not in ("==", "<", "<=", ">", ">="):
            raise NotImplementedError(
                f"filters: {operator.value!r}; expected ==, !=, <, <=, >, >=, in, nin, is_empty, contains, any, all or "
                "text_match"
            )
        return f"{key} is not null and {comparison(key, operator.value, value)}"


def _of_several(name: str, operator: str, values: Any) -> str:
    """Return the test of an attribute beside several values."""
    if not isinstance(values, list):
        raise TypeError(f"filters: {name} {operator} {values!r}: expected a list of values")
    return f"{name} is not null and ({comparison(name, operator, values)})"
