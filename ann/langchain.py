"""A vector store of LangChain on an index on SSD (extra ``langchain``).

Examples
--------
>>> import tempfile
>>> from langchain_core.embeddings import DeterministicFakeEmbedding
>>> from memhier.ann.langchain import ZoomStore
>>> place = tempfile.mkdtemp() + "/store"
>>> store = ZoomStore(DeterministicFakeEmbedding(size=8), place, attributes=["lang"], dram="16MiB", grow_to=1000)
>>> ids = store.add_texts(["Hallo", "Hello"], [{"lang": "de"}, {"lang": "en"}])
>>> [found] = store.similarity_search("Hi", k=2, filter={"lang": "en"})
>>> found.page_content
'Hello'
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeAlias
from uuid import uuid4

import numpy as np

from memhier.ann.documents import DocumentIndex, comparison
from memhier.lazy import extra_for

with extra_for(__name__):
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance

__all__ = ["ZoomStore"]

Filter: TypeAlias = dict[str, Any] | str | None


class ZoomStore(VectorStore):
    """Documents with vectors on SSD, of which DRAM holds a small preview.

    Changes are durable when a call returns. Scores are distances of the metric: for cosine, 1 - similarity.

    Parameters
    ----------
    embedding
        Turns texts into vectors.
    path
        The directory of the index: opened if it exists, otherwise made with the first document.
    attributes
        Keys of the metadata by which searches may filter. Values of one key are of one type: number, bool, text or
        None. Other metadata is kept, too: any JSON value.
    **options
        ``metric`` (``"cosine"`` by default), ``dram``, ``grow_to`` and ``seed`` of
        :class:`memhier.ann.documents.DocumentIndex`.

    Attributes
    ----------
    records
        The :class:`memhier.ann.documents.DocumentIndex`; ``records.index`` is the :class:`memhier.ann.ZoomIndex`.

    Notes
    -----
    ``filter`` of a search is a dict of values that keys have to equal (a list: one of them), or a `where` of
    :meth:`memhier.ann.ZoomIndex.search`. Other options of a search go to that, such as ``recall=``.
    """

    def __init__(
        self, embedding: Embeddings, path: str | os.PathLike[str], *, attributes: Sequence[str] = (), **options: Any
    ) -> None:
        self._embedding = embedding
        self.records: DocumentIndex = DocumentIndex(path, attributes=attributes, **options)

    @property
    def embeddings(self) -> Embeddings:
        """The embedding of texts."""
        return self._embedding

    @classmethod
    def from_texts(
        cls, texts: list[str], embedding: Embeddings, metadatas: list[dict[str, Any]] | None = None,
        *, ids: list[str] | None = None, path: str | os.PathLike[str], **options: Any,
    ) -> Self:  # fmt: skip
        """Open or make the store at `path` and add texts."""
        store = cls(embedding, path, **options)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[str]:
        """Add texts, and replace those whose ids are there; return the ids, made up where there is none."""
        given = list(texts)
        about = [{} for _ in given] if metadatas is None else list(metadatas)
        names = [None] * len(given) if ids is None else list(ids)
        if not len(given) == len(about) == len(names):
            raise ValueError(
                f"{len(given)} texts, {len(about)} metadatas and {len(names)} ids: expected as many of each"
            )
        chosen = [str(uuid4()) if name is None else name for name in names]
        if given:
            records = [{"text": text, "metadata": each} for text, each in zip(given, about, strict=True)]
            self.records.put(chosen, self._embedding.embed_documents(given), records, about)
        return chosen

    def delete(self, ids: list[str] | None = None, **options: Any) -> bool:
        """Remove documents; ids that are not there are passed over."""
        if ids is None:
            raise ValueError("ids=None: expected the ids of documents to delete")
        self.records.discard(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return documents; ids that are not there are left out."""
        return [_document(name, record) for name, record in self.records.get(ids)]

    def similarity_search(self, query: str, k: int = 4, filter: Filter = None, **options: Any) -> list[Document]:
        """Return the `k` documents nearest to a text."""
        return [document for document, _ in self.similarity_search_with_score(query, k, filter, **options)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter = None, **options: Any
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents nearest to a text with their distances."""
        return self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k, filter, **options)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter = None, **options: Any
    ) -> list[Document]:
        """Return the `k` documents nearest to a vector."""
        found = self.similarity_search_with_score_by_vector(embedding, k, filter, **options)
        return [document for document, _ in found]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter = None, **options: Any
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents nearest to a vector with their distances."""
        found = self.records.search(embedding, k, self._where(filter), **options)
        return [(_document(name, record), distance) for name, record, distance in found]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, filter: Filter = None, **options: Any
    ) -> list[Document]:
        """Return `k` unlike documents among the `fetch_k` nearest to a text; `lambda_mult` 1 is the least unlike."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter, **options)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter = None,
        **options: Any,
    ) -> list[Document]:
        """Return `k` unlike documents among the `fetch_k` nearest to a vector."""
        found = self.records.search(embedding, fetch_k, self._where(filter), **options)
        if not found or self.records.index is None:
            return []
        vectors = self.records.index.reconstruct([name for name, _, _ in found])
        chosen = maximal_marginal_relevance(np.array(embedding), list(vectors), lambda_mult, k)
        return [_document(*found[row][:2]) for row in chosen]

    def close(self) -> None:
        """Close the index. May be called twice."""
        self.records.close()

    def _where(self, filter: Filter) -> str | None:
        if filter is None or isinstance(filter, str):
            return filter
        if not isinstance(filter, dict):
            raise TypeError(f'filter={filter!r}: expected a dict of values, or text such as "price < 10"')
        if unknown := sorted(filter.keys() - set(self.records.attributes)):
            raise ValueError(
                f"filter: {unknown[0]!r} is none of the attributes {self.records.attributes} of this store"
            )
        for key, value in filter.items():
            if isinstance(value, dict):
                raise TypeError(
                    f"filter: {key} is compared with {value}: write such a test as text, filter='{key} > 3'"
                )
        tests = [
            comparison(key, "in" if isinstance(value, list | tuple) else "==", value) for key, value in filter.items()
        ]
        return " and ".join(tests) or None

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        metric = self.records.metric
        if metric == "l2":  # LangChain's is of distances that are not squared
            return lambda squared: float(self._euclidean_relevance_score_fn(math.sqrt(squared)))
        return lambda distance: float(
            (self._cosine_relevance_score_fn if metric == "cosine" else self._max_inner_product_relevance_score_fn)(
                distance
            )
        )


def _document(name: str, record: dict[str, Any]) -> Document:
    return Document(id=name, page_content=record["text"], metadata=record["metadata"])
