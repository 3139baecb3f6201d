"""The index of a Hugging Face data set beside its faiss index (``make test-plugins``)."""

import copy
import importlib
import os
import pickle

import numpy as np
import pytest

if os.environ.get("MEMHIER_PLUGINS") != "1":  # there it must not be missing
    pytest.importorskip("datasets", reason="make test-plugins tries it")
import datasets

from memhier.ann import ZoomIndex
from memhier.ann.datasets import ZoomDatasetIndex, add_zoom_index, load_zoom_index

MATRIX = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32)


def data():
    return datasets.Dataset.from_dict({"text": [f"row {row}" for row in range(400)], "v": MATRIX})


@pytest.fixture
def both(tmp_path):
    dataset = data()
    add_zoom_index(dataset, "v", path=tmp_path / "x", index_name="zoom")
    dataset.with_format("numpy")
    dataset.set_format("numpy")
    dataset.add_faiss_index("v")
    dataset.reset_format()
    return dataset


@pytest.mark.parametrize("k", [1, 5, 400, 450])
def test_answers_are_those_of_the_faiss_index(both, k):
    assert set(both.list_indexes()) == {"zoom", "v"}
    mine, theirs = (both.search_batch(name, QUERIES, k, **more) for name, more in (("zoom", {"recall": 1}), ("v", {})))
    np.testing.assert_array_equal(mine.total_indices, theirs.total_indices)
    found = np.array(mine.total_indices) >= 0
    np.testing.assert_allclose(mine.total_scores[found], theirs.total_scores[found], rtol=1e-4)
    for query in (QUERIES[2], QUERIES[2:3]):
        mine, theirs = both.search("zoom", query, k, recall=1), both.search("v", query, k)
        np.testing.assert_array_equal(mine.indices, theirs.indices)
        mine, theirs = both.get_nearest_examples("zoom", query, k, recall=1), both.get_nearest_examples("v", query, k)
        assert mine.examples == theirs.examples
        assert len(mine.scores) == min(k, 400)
    mine, theirs = (
        both.get_nearest_examples_batch(name, QUERIES, k, **more) for name, more in (("zoom", {"recall": 1}), ("v", {}))
    )
    assert mine.total_examples == theirs.total_examples
    assert list(map(len, mine.total_scores)) == list(map(len, theirs.total_scores))


def test_other_kinds_of_queries(both):
    torch = importlib.import_module("torch")
    for query in (QUERIES[0].tolist(), torch.from_numpy(QUERIES[0]).bfloat16(), QUERIES[0].astype(np.float64)):
        assert both.search("zoom", query, 3).indices[0] == both.search("zoom", QUERIES[0], 3).indices[0]


def test_an_index_is_saved_and_loaded(both, tmp_path):
    wanted = both.search_batch("zoom", QUERIES, 5).total_indices
    both.get_index("zoom").save(tmp_path / "copy")
    both.drop_index("zoom")
    assert both.list_indexes() == ["v"]
    for place in ("x", "copy"):
        load_zoom_index(both, place, tmp_path / place)
        np.testing.assert_array_equal(both.search_batch(place, QUERIES, 5).total_indices, wanted)
    with pytest.raises(ValueError, match="400 vectors, expected one for each of 10 rows"):
        load_zoom_index(data().select(range(10)), "x", tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        load_zoom_index(both, "x", tmp_path / "none")


def test_copies_of_a_data_set_keep_the_index(both):
    both.drop_index("v")
    wanted = both.search("zoom", QUERIES[0], 5).indices
    for other in (both.with_format("torch"), copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert isinstance(other.get_index("zoom"), ZoomDatasetIndex)
        np.testing.assert_array_equal(other.search("zoom", QUERIES[0], 5).indices, wanted)
    with pytest.raises(Exception, match="index"):
        both.select([0, 1])  # as with an index of faiss


def test_options_and_filters(tmp_path):
    dataset = data()
    add_zoom_index(dataset, "v", path=tmp_path / "x", metric="cosine", attributes={"part": np.arange(400) % 4})
    scores, examples = dataset.get_nearest_examples("v", QUERIES[0], k=5, where="part == 2")
    assert all(int(text.split()[1]) % 4 == 2 for text in examples["text"])
    assert (np.diff(scores) >= 0).all()
    with pytest.raises(ValueError, match="column='w': expected one of text, v"):
        add_zoom_index(dataset, "w", path=tmp_path / "y")
    with pytest.raises(TypeError, match="ids="):
        add_zoom_index(dataset, "v", path=tmp_path / "y", ids=range(400))
    with pytest.raises(FileExistsError):
        add_zoom_index(dataset, "v", path=tmp_path / "x")


def test_changes_of_a_data_set_are_those_of_one_with_a_faiss_index(both):
    plain = data()
    plain.add_faiss_index("v", index_name="zoom")
    both.drop_index("v")
    for change in (
        lambda dataset: dataset.shuffle(seed=0), lambda dataset: dataset.filter(lambda row: True),
        lambda dataset: dataset.select(range(3)), lambda dataset: dataset.sort("text"),
        lambda dataset: dataset.train_test_split(0.5), lambda dataset: dataset.save_to_disk("unused"),
        lambda dataset: dataset.shard(2, 0), lambda dataset: dataset.drop_index("none"),
    ):  # fmt: skip
        errors = []
        for dataset in (both, plain):
            with pytest.raises(Exception) as error:  # noqa: PT011
                change(dataset)
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]
    for change in (
        lambda dataset: dataset.map(lambda row: {"n": len(row["text"])}),
        lambda dataset: dataset.remove_columns("v"), lambda dataset: dataset.rename_column("text", "title"),
        lambda dataset: dataset.add_item({"text": "new", "v": MATRIX[0]}),
    ):  # fmt: skip
        mine, theirs = change(both), change(plain)
        assert mine.list_indexes() == theirs.list_indexes()
        if mine.list_indexes():
            mine, theirs = (each.get_nearest_examples("zoom", QUERIES[0], 3) for each in (mine, theirs))
            assert mine.examples == theirs.examples
    near = both.map(lambda row: {"near": both.search("zoom", np.array(row["v"], np.float32), 1).indices[0]})
    assert near["near"][:] == list(range(400))


def test_an_index_of_chosen_rows_numbers_those(tmp_path):
    for name, dataset in (
        ("shuffled", data().shuffle(seed=1)), ("filtered", data().filter(lambda row: row["text"].endswith("7")))
    ):  # fmt: skip
        add_zoom_index(dataset, "v", path=tmp_path / name, index_name="x")
        assert len(dataset.get_index("x").index) == len(dataset)
        for row in (0, len(dataset) - 1):
            found = dataset.get_nearest_examples("x", np.array(dataset[row]["v"], np.float32), 1)
            assert found.examples["text"] == [dataset[row]["text"]]


def test_a_data_set_is_saved_without_its_index_which_is_attached_again(tmp_path):
    dataset = data()
    add_zoom_index(dataset, "v", path=tmp_path / "x")
    dataset.drop_index("v")
    dataset.save_to_disk(tmp_path / "data")
    again = datasets.load_from_disk(tmp_path / "data")
    load_zoom_index(again, "v", tmp_path / "x")
    assert again.get_nearest_examples("v", MATRIX[9], 1).examples["text"] == ["row 9"]


def test_data_sets_without_numbered_rows_are_refused(tmp_path):
    stream = data().to_iterable_dataset()
    for dataset in (stream, datasets.DatasetDict(train=data())):
        with pytest.raises(TypeError, match="expected a Dataset"):
            add_zoom_index(dataset, "v", path=tmp_path / "x")
        assert not (tmp_path / "x").exists()
    with ZoomIndex.build(tmp_path / "x", stream["v"]) as index:  # as the error says
        assert index.search(MATRIX[7], 1).ids.tolist() == [7]
