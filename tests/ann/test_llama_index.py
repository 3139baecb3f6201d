"""The vector store of LlamaIndex beside its own in memory (``make test-plugins``)."""

import os

import numpy as np
import pytest

if os.environ.get("MEMHIER_PLUGINS") != "1":  # there it must not be missing
    pytest.importorskip("llama_index", reason="make test-plugins tries it")
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import SimpleVectorStore, VectorStoreQuery
from llama_index.core.vector_stores.types import (
    FilterCondition,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQueryMode,
)

from memhier.ann.llama_index import ZoomVectorStore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL = {"dram": "16MiB", "grow_to": 1000}
VECTORS = np.random.default_rng(0).normal(size=(60, 8))
QUERY = np.random.default_rng(1).normal(size=8).tolist()


def nodes():
    made = []
    for number, vector in enumerate(VECTORS.tolist()):
        about = {"part": number % 3, "lang": ["en", "it's"][number % 2], "n": number}
        if number % 5 == 0:
            del about["part"]
        source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc {number // 10}")}
        made.append(TextNode(
            text=f"text {number}", id_=f"n{number}", metadata=about, embedding=vector, relationships=source
        ))  # fmt: skip
    return made


@pytest.fixture
def both(tmp_path):
    ours, plain = ZoomVectorStore(tmp_path / "store", attributes=["part", "lang"], **SMALL), SimpleVectorStore()
    assert ours.add(nodes()) == plain.add(nodes())
    yield ours, plain
    ours.close()


def same(ours, plain, **options):
    query = VectorStoreQuery(query_embedding=QUERY, **{"similarity_top_k": 100, **options})
    mine, theirs = ours.query(query, recall=1), plain.query(query)
    assert mine.ids == theirs.ids
    np.testing.assert_allclose(mine.similarities, theirs.similarities, atol=1e-5)
    known = {node.node_id: node for node in nodes()}
    for name, node in zip(mine.ids, mine.nodes, strict=True):
        assert (node.text, node.metadata, node.ref_doc_id) == (
            known[name].text, known[name].metadata, known[name].ref_doc_id
        )  # fmt: skip
    return mine.ids


TESTS = [
    ("part", "==", 1), ("part", "!=", 1), ("part", ">", 0), ("part", ">=", 1), ("part", "<", 2), ("part", "<=", 1),
    ("part", "in", [0, 2]), ("part", "nin", [0, 2]), ("part", "is_empty", None), ("lang", "==", "it's"),
    ("lang", "in", ["en"]), ("lang", "!=", "en"), ("part", "in", []), ("part", "nin", []),
]  # fmt: skip


@pytest.mark.parametrize("condition", list(FilterCondition))
def test_filters_choose_as_those_in_memory(both, condition):
    for first in range(len(TESTS)):
        filters = [MetadataFilter(key=key, operator=operator, value=value)
                   for key, operator, value in (TESTS[first], TESTS[(first * 5 + 3) % len(TESTS)])]  # fmt: skip
        for chosen in (filters[:1], filters):
            same(*both, filters=MetadataFilters(filters=chosen, condition=condition))


def test_answers_are_those_of_the_store_in_memory(both):
    assert len(same(*both)) == 60
    assert len(same(*both, similarity_top_k=7)) == 7
    for store in both:
        store.delete("doc 3")
        store.delete("doc 99")
        store.delete_nodes(node_ids=["n1", "n2", "n99"])
    assert len(same(*both)) == 48
    filters = MetadataFilters(filters=[MetadataFilter(key="part", value=2)])
    for store in both:
        store.delete_nodes(filters=filters)
    left = same(*both)
    assert left
    ours = both[0]
    chosen = ours.query(
        VectorStoreQuery(query_embedding=QUERY, similarity_top_k=100, doc_ids=["doc 4", "doc 5"]), recall=1
    )
    assert set(chosen.ids) == {name for name in left if int(name[1:]) >= 40}
    assert [node.node_id for node in ours.get_nodes(["n3", "n1", "n4"])] == ["n3", "n4"]
    ours.clear()
    assert ours.query(VectorStoreQuery(query_embedding=QUERY)).ids == []


def test_what_is_not_served_is_refused(both):
    ours, _ = both
    for key, operator, error in (("n", "==", ValueError), ("part", "contains", NotImplementedError)):
        filters = MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=1)])
        with pytest.raises(error, match="filters: "):
            ours.query(VectorStoreQuery(query_embedding=QUERY, filters=filters))
    for options in ({"mode": VectorStoreQueryMode.HYBRID}, {"node_ids": ["n1"]}, {"query_embedding": None}):
        with pytest.raises(NotImplementedError, match="query: "):
            ours.query(VectorStoreQuery(**{"query_embedding": QUERY, **options}))


async def test_an_index_of_llama_index(tmp_path):
    store = ZoomVectorStore(tmp_path / "store", attributes=["lang"], **SMALL)
    documents = [Document(text=f"text {number}", id_=f"d{number}", metadata={"lang": "en"}) for number in range(5)]
    index = VectorStoreIndex.from_documents(
        documents, StorageContext.from_defaults(vector_store=store), embed_model=MockEmbedding(8)
    )
    assert len(index.as_retriever(similarity_top_k=10).retrieve("text")) == 5
    index.delete_ref_doc("d2")
    store.close()
    again = ZoomVectorStore(tmp_path / "store", attributes=["lang"])
    index = VectorStoreIndex.from_vector_store(again, embed_model=MockEmbedding(8))
    found = await index.as_retriever(similarity_top_k=10).aretrieve("text")
    assert sorted(node.text for node in found) == ["text 0", "text 1", "text 3", "text 4"]
    again.close()
