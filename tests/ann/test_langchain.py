"""The vector store with LangChain's own tests (``make test-plugins``)."""

import importlib
import os
import re
from contextlib import closing

import numpy as np
import pytest

if os.environ.get("MEMHIER_PLUGINS") != "1":  # there it must not be missing
    pytest.importorskip("langchain_tests", reason="make test-plugins tries it")
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from memhier.ann.langchain import ZoomStore

SMALL = {"dram": "16MiB", "grow_to": 1000}


class TestStandard(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path):
        store = ZoomStore(self.get_embeddings(), tmp_path / "store", **SMALL)
        yield store
        store.close()


EMBEDDING = DeterministicFakeEmbedding(size=16)
TEXTS = [f"text {number}" for number in range(60)]
ABOUT = [
    {"part": number % 3, "lang": ["en", "it's"][number % 2], "tags": [number], "new": True} for number in range(60)
]


@pytest.fixture(params=["cosine", "l2", "ip"])
def store(tmp_path, request):
    made = ZoomStore.from_texts(
        TEXTS, EMBEDDING, ABOUT, ids=[f"n{number}" for number in range(60)], path=tmp_path / "store",
        attributes=["part", "lang", "new"], metric=request.param, **SMALL,
    )  # fmt: skip
    yield made
    made.close()


def test_filters(store):
    for filter, wanted in (
        ({"part": 1}, lambda about: about["part"] == 1),
        ({"part": 1, "lang": "it's"}, lambda about: about["part"] == 1 and about["lang"] == "it's"),
        ({"part": [0, 2], "new": True}, lambda about: about["part"] != 1),
        ("part >= 1 and lang == 'en'", lambda about: about["part"] >= 1 and about["lang"] == "en"),
        ({}, lambda about: True),
        ({"lang": None}, lambda about: False),
    ):
        found = store.similarity_search("text 7", k=100, filter=filter)
        assert sorted(document.page_content for document in found) == sorted(
            text for text, about in zip(TEXTS, ABOUT, strict=True) if wanted(about)
        )
        assert all(document.metadata in ABOUT for document in found)
    with pytest.raises(ValueError, match="'tags' is none of the attributes"):
        store.similarity_search("text 7", filter={"tags": 1})
    with pytest.raises(TypeError, match="compared with"):
        store.similarity_search("text 7", filter={"part": {"$gt": 1}})


def test_scores_and_retrievers(store):
    [(nearest, score), *others] = store.similarity_search_with_score("text 7", k=3)
    if store.records.metric != "ip":
        assert (nearest.page_content, nearest.id) == ("text 7", "n7")
        assert score == pytest.approx(0, abs=1e-5)
    assert [score, *(other for _, other in others)] == sorted([score, *(other for _, other in others)])
    if store.records.metric == "cosine":
        vectors = np.array(EMBEDDING.embed_documents(TEXTS))
        query = np.array(EMBEDDING.embed_query("text 7"))
        likeness = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
        scored = store.similarity_search_with_relevance_scores("text 7", k=3)
        np.testing.assert_allclose([value for _, value in scored], np.sort(likeness)[::-1][:3], atol=1e-5)
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 5, "fetch_k": 30, "filter": {"part": 1}})
    found = retriever.invoke("text 7")
    assert len({document.id for document in found}) == 5
    assert all(document.metadata["part"] == 1 for document in found)


def test_a_store_is_opened_again(store, tmp_path):
    store.add_documents([Document("new", metadata={"part": 9}), Document("text 3", id="n3", metadata={"part": 9})])
    wanted = store.similarity_search("new", k=100, filter={"part": 9})
    assert {document.page_content for document in wanted} == {"new", "text 3"}
    store.close()
    again = ZoomStore(EMBEDDING, tmp_path / "store", attributes=["part", "lang", "new"])
    assert again.similarity_search("new", k=100, filter={"part": 9}) == wanted
    assert [document.metadata for document in again.get_by_ids(["n3", "none", "n4"])] == [{"part": 9}, ABOUT[4]]
    assert again.similarity_search("x", k=100, filter="lang is null") == again.similarity_search(
        "x", k=100, filter={"part": 9}
    )
    again.close()


def test_a_store_without_documents(tmp_path):
    store = ZoomStore(EMBEDDING, tmp_path / "store")
    assert store.similarity_search("x") == store.max_marginal_relevance_search("x") == store.get_by_ids(["a"]) == []
    assert store.add_texts([]) == []
    assert not (tmp_path / "store").exists()
    assert store.add_texts(["a", "b", "c"], ids=["1", "2", "1"]) == ["1", "2", "1"]
    assert store.get_by_ids(["1"])[0].page_content == "c"
    with pytest.raises(ValueError, match="2 texts, 2 metadatas and 1 ids"):
        store.add_texts(["a", "b"], ids=["1"])
    store.delete(["1", "2"])
    assert store.similarity_search("x") == store.max_marginal_relevance_search("x") == []
    store.close()


@pytest.mark.filterwarnings("ignore:Relevance scores must be between 0 and 1")
async def test_every_search_has_its_asynchronous_twin(store):
    vector = EMBEDDING.embed_query("text 7")
    for name, arguments, options in (
        ("similarity_search", ("text 7",), {"k": 3, "filter": {"part": 1}}),
        ("similarity_search_with_score", ("text 7",), {"k": 3}),
        ("similarity_search_by_vector", (vector,), {"k": 3, "filter": "part != 1"}),
        ("similarity_search_with_relevance_scores", ("text 7",), {"k": 3}),
        ("max_marginal_relevance_search", ("text 7",), {"k": 3, "fetch_k": 9, "lambda_mult": 0.2}),
        ("max_marginal_relevance_search_by_vector", (vector,), {"k": 3, "fetch_k": 9}),
        ("get_by_ids", (["n3", "n2"],), {}),
        ("search", ("text 7",), {"search_type": "mmr", "k": 2}),
    ):
        found = getattr(store, name)(*arguments, **options)
        assert len(found) == options.get("k", 2)
        assert await getattr(store, f"a{name}")(*arguments, **options) == found
    assert await store.aadd_documents([Document("new", id="n99", metadata={"part": 9})]) == ["n99"]
    retriever = store.as_retriever(search_kwargs={"k": 3, "filter": {"part": 9}})
    assert [[each.id for each in found] for found in await retriever.abatch(["x", "y"])] == [["n99"]] * 2
    assert await store.adelete(["n99"])
    assert store.get_by_ids(["n99"]) == []


async def test_stores_are_made_from_texts_and_documents(tmp_path):
    documents = [Document("a", id="x", metadata={"n": 1}), Document("b")]
    made = [
        ZoomStore.from_documents(documents, EMBEDDING, path=tmp_path / "a", attributes=["n"], **SMALL),
        await ZoomStore.afrom_documents(documents, EMBEDDING, path=tmp_path / "b", attributes=["n"], **SMALL),
        await ZoomStore.afrom_texts(
            ["a", "b"], EMBEDDING, [{"n": 1}, {}], ids=["x", "y"], path=tmp_path / "c", attributes=["n"], **SMALL
        ),
    ]
    for store in made:
        assert [found.page_content for found in store.similarity_search("a", filter={"n": 1})] == ["a"]
        assert store.similarity_search("a", filter={"n": []}) == []
        assert len(store.similarity_search("a", filter="n is null or n > 0")) == 2
        store.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda store: store.similarity_search("x", filter=lambda document: True),
            "expected a dict of values, or text",
        ),
        (lambda store: store.similarity_search("x", filter={"part": {"$gt": 1}}), "filter='part > 3'"),
        (lambda store: store.delete("n3"), "ids='n3': expected a list of ids"),
        (lambda store: store.get_by_ids("n3"), "ids='n3': expected a list of ids"),
        (lambda store: ZoomStore(EMBEDDING, "unused", attributes="lang"), "attributes='lang': expected a list"),
        (lambda store: store.similarity_search("x", fetch=3), "unexpected keyword argument 'fetch'"),
    ],
)
def test_what_cannot_be_meant_is_refused(store, call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call(store)
    assert len(store.similarity_search("x", k=100)) == 60


@pytest.mark.filterwarnings("ignore")
def test_the_indexing_of_langchain_renews_and_removes(tmp_path):
    indexing = importlib.import_module("langchain_core.indexing")
    manager = indexing.InMemoryRecordManager("notes")
    manager.create_schema()
    with closing(ZoomStore(EMBEDDING, tmp_path / "store", **SMALL)) as store:
        documents = [Document(f"text {number}", metadata={"source": f"s{number}"}) for number in range(5)]
        for kept, added, removed in ((documents, 5, 0), (documents[:3], 0, 2)):
            told = indexing.index(kept, manager, store, cleanup="full", source_id_key="source", key_encoder="sha256")
            assert (told["num_added"], told["num_deleted"]) == (added, removed)
            assert {each.page_content for each in store.similarity_search("x", k=9)} == {
                each.page_content for each in kept
            }
