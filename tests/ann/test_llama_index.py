"""The vector store of LlamaIndex beside its own in memory (``make test-plugins``)."""

import os

import numpy as np
import pytest

if os.environ.get("MEMHIER_PLUGINS") != "1":  # there it must not be missing
    pytest.importorskip("llama_index", reason="make test-plugins tries it")
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
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
        if number % 7 == 0:
            about["lang"] = ""
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
    ("lang", "in", ["en"]), ("lang", "!=", "en"), ("part", "in", []), ("part", "nin", []), ("lang", "is_empty", None),
    ("doc_id", "==", "doc 3"), ("document_id", "in", ["doc 1", "doc 9"]), ("ref_doc_id", "!=", "doc 2"),
    ("lang", "text_match", "t'"),
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


@pytest.mark.parametrize("threshold", [None, 0.2, 0.9])
def test_the_choice_of_unlike_nodes_is_that_of_the_store_in_memory(both, threshold):
    ours, plain = both
    query = VectorStoreQuery(query_embedding=QUERY, similarity_top_k=9, mode=VectorStoreQueryMode.MMR)
    mine, theirs = (store.query(query, mmr_threshold=threshold, **more)
                    for store, more in ((ours, {"recall": 1, "mmr_prefetch_k": 60}), (plain, {})))  # fmt: skip
    assert mine.ids == theirs.ids
    np.testing.assert_allclose(mine.similarities, theirs.similarities, atol=1e-5)
    assert [node.node_id for node in mine.nodes] == mine.ids
    query.mmr_threshold = threshold
    assert ours.query(query, mmr_prefetch_k=60, recall=1).ids == theirs.ids
    nearest = ours.query(VectorStoreQuery(query_embedding=QUERY, similarity_top_k=18), recall=1).ids
    assert set(ours.query(query, mmr_prefetch_factor=2, recall=1).ids) <= set(nearest)
    query.filters = MetadataFilters(filters=[MetadataFilter(key="part", value=1)])
    assert {node.metadata["part"] for node in ours.query(query).nodes} == {1}
    ours.clear()
    assert ours.query(query).ids == []


async def test_nodes_are_read_and_removed_by_ids_and_filters(both):
    ours, plain = both
    filters = MetadataFilters(filters=[MetadataFilter(key="part", value=1, operator=">=")])
    chosen = {node.node_id for node in nodes() if node.metadata.get("part", 0) >= 1}
    assert {node.node_id for node in ours.get_nodes(filters=filters)} == chosen
    assert {node.node_id for node in await ours.aget_nodes(filters=filters)} == chosen
    assert {node.node_id for node in ours.get_nodes()} == {node.node_id for node in nodes()}
    both_ways = ours.get_nodes(["n8", "n2", "n99", "n5", "n8"], filters)
    assert [node.node_id for node in both_ways] == [name for name in ("n8", "n2", "n5") if name in chosen]
    ours.delete_nodes()
    for store in both:
        store.delete_nodes(["n1", "n5", "n6"], filters)
        await store.adelete_nodes(["n2"])
        await store.adelete("doc 4")
    same(*both)
    assert await ours.async_add(nodes()[:3]) == plain.add(nodes()[:3])
    query = VectorStoreQuery(query_embedding=QUERY, similarity_top_k=100)
    assert (await ours.aquery(query, recall=1)).ids == plain.query(query).ids
    await ours.aclear()
    assert ours.get_nodes() == ours.get_nodes(filters=filters) == ours.get_nodes(["n1"]) == []


def test_lists_are_chosen_by_their_items(tmp_path):
    """As LlamaIndex's own store in memory chooses them."""
    tags = [["new", "red"], ["red"], ["old", "red", "new"], None, ["old"], ["it's"]]
    made = [
        TextNode(text=f"text {n}", id_=f"n{n}", metadata={} if each is None else {"tags": each}, embedding=[1.0, n])
        for n, each in enumerate(tags)
    ]
    store = ZoomVectorStore(tmp_path / "store", attributes=["tags"], **SMALL)
    store.add(made)
    plain = SimpleVectorStore()
    plain.add(made)
    tests = [
        ("contains", "red"), ("contains", "it's"), ("contains", "none"), ("any", ["new", "old"]), ("any", ["none"]),
        ("all", ["new", "red"]), ("all", ["red"]), ("any", []), ("all", []),
    ]  # fmt: skip
    for operator, value in tests:
        filters = MetadataFilters(filters=[MetadataFilter(key="tags", operator=operator, value=value)])
        query = VectorStoreQuery(query_embedding=[1.0, 2.0], similarity_top_k=9, filters=filters)
        wanted = {
            "contains": lambda have, value=value: value in have,
            "any": lambda have, value=value: any(each in have for each in value),
            "all": lambda have, value=value: all(each in have for each in value),
        }[operator]
        expected = {f"n{n}" for n, have in enumerate(tags) if have is not None and wanted(have)}
        assert {*store.query(query, recall=1).ids} == expected, (operator, value)
        assert {*plain.query(query).ids} >= expected
    with pytest.raises(TypeError, match="filters: "):
        store.get_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="tags", operator="any", value="red")]))
    store.close()


def test_text_is_matched_as_the_plain_store_does(tmp_path):
    texts = ["100%", "a_b", "ab", "A B", "back\\slash", "", None]
    made = [
        TextNode(text=f"text {n}", id_=f"n{n}", metadata={} if each is None else {"t": each}, embedding=[1.0, n])
        for n, each in enumerate(texts)
    ]
    store = ZoomVectorStore(tmp_path / "store", attributes=["t"], **SMALL)
    store.add(made)
    for part in ("0%", "_", "b", "\\", "", "'"):
        filters = MetadataFilters(filters=[MetadataFilter(key="t", operator="text_match", value=part)])
        query = VectorStoreQuery(query_embedding=[1.0, 2.0], similarity_top_k=9, filters=filters)
        expected = {f"n{n}" for n, each in enumerate(texts) if each is not None and part in each}
        assert {*store.query(query, recall=1).ids} == expected, part
    store.close()


def test_what_is_not_served_is_refused(both):
    ours, _ = both
    for key, operator, error, value in (
        ("n", "==", ValueError, 1), ("lang", "in", TypeError, "en"), ("lang", "nin", TypeError, "en"),
        ("part", "==", TypeError, [1]), ("lang", "text_match_insensitive", NotImplementedError, "x"),
    ):  # fmt: skip
        filters = MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=value)])
        for call in (
            lambda filters=filters: ours.query(VectorStoreQuery(query_embedding=QUERY, filters=filters)),
            lambda filters=filters: ours.get_nodes(filters=filters),
            lambda filters=filters: ours.delete_nodes(filters=filters),
        ):
            with pytest.raises(error, match=r"filters?: "):
                call()
    modes = {*VectorStoreQueryMode} - {VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR}
    for options in (*({"mode": mode} for mode in modes), {"node_ids": ["n1"]}, {"query_embedding": None}):
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


def test_a_storage_context_is_persisted_and_loaded(tmp_path):
    store = ZoomVectorStore(tmp_path / "store", **SMALL)
    documents = [Document(text=f"text {number}", id_=f"d{number}") for number in range(5)]
    index = VectorStoreIndex.from_documents(
        documents, StorageContext.from_defaults(vector_store=store), embed_model=MockEmbedding(8)
    )
    index.storage_context.persist(tmp_path / "context")
    store.close()
    store = ZoomVectorStore(tmp_path / "store")
    context = StorageContext.from_defaults(vector_store=store, persist_dir=str(tmp_path / "context"))
    again = load_index_from_storage(context, embed_model=MockEmbedding(8))
    retriever = again.as_retriever(
        similarity_top_k=3, vector_store_query_mode="mmr", vector_store_kwargs={"mmr_threshold": 0.3}
    )
    assert len(retriever.retrieve("text")) == 3
    again.insert(Document(text="new", id_="d9"))
    again.update_ref_doc(Document(text="changed", id_="d1"))
    again.delete_ref_doc("d2", delete_from_docstore=True)
    found = again.as_retriever(similarity_top_k=10).retrieve("text")
    assert sorted(each.text for each in found) == ["changed", "new", "text 0", "text 3", "text 4"]
    store.close()


def test_a_pipeline_of_documents_renews_those_that_changed(tmp_path):
    store = ZoomVectorStore(tmp_path / "store", **SMALL)
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=32, chunk_overlap=0), MockEmbedding(8)], vector_store=store,
        docstore=SimpleDocumentStore(), docstore_strategy=DocstoreStrategy.UPSERTS,
    )  # fmt: skip
    pipeline.run(documents=[Document(text=f"text {number}. " * 30, id_=f"d{number}") for number in range(3)])
    before = len(store.get_nodes())
    assert before > 3
    pipeline.run(documents=[Document(text="short", id_="d1")])
    left = store.get_nodes()
    assert len(left) < before
    assert [node.text for node in left if node.ref_doc_id == "d1"] == ["short"]
    store.close()
