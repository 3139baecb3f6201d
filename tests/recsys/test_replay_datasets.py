"""Storage as a data set: items, workers of loaders, mixtures, streams, and Hugging Face in and out."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data

from memhier.recsys.replay import CarouselBuffer, Field, StoredSamples
from memhier.recsys.replay.datasets import MixedDataset, ShuffledStream, add_rows, to_huggingface

COUNT = 137


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with CarouselBuffer(tmp_path / "b", memory=8, schema={"x": ("float32", (2, 3)), "labels": "int16"}) as buffer:
        add(buffer, COUNT)
        buffer.checkpoint()
    return tmp_path / "b"


@pytest.fixture
def stored(place: Path) -> Iterator[StoredSamples]:
    with StoredSamples(place) as samples:
        yield samples


def add(buffer: CarouselBuffer, count: int) -> None:
    ids = np.arange(count)
    values = np.repeat(ids, 6).reshape(count, 2, 3).astype(np.float32)
    buffer.add({"x": values, "labels": -ids.astype(np.int16)}, labels=ids % 5, ids=ids + 1000)


def test_items_are_the_samples_by_position(stored: StoredSamples) -> None:
    batch = stored.read(np.arange(COUNT))
    for position in (0, 5, COUNT - 1, -1, -COUNT):
        sample = stored[position]
        assert sorted(sample) == ["buffer.labels", "ids", "labels", "x"]
        np.testing.assert_array_equal(sample["x"], batch["x"][position])
        assert sample["labels"] == batch["labels"][position]
        assert (sample["ids"], sample["buffer.labels"]) == (batch.ids[position], batch.labels[position])
    assert [int(sample["ids"]) for sample in stored] == batch.ids.tolist()
    assert stored.__getitems__([]) == []
    for position in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=str(COUNT)):
            stored[position]
    with pytest.raises(TypeError):
        stored[0.5]  # type: ignore[index]


def loaded(dataset: Any, workers: int, start: str | None = None, **options: Any) -> list[int]:
    """Return the ids that a loader brings."""
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=16, num_workers=workers, multiprocessing_context=start, **options
    )
    ids: list[int] = []
    for batch in loader:
        assert batch["x"].shape[1:] == (2, 3)
        assert (batch["x"][:, 1, 2] + 1000 == batch["ids"]).all()
        ids += batch["ids"].tolist()
    return ids


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_loader_read_storage(stored: StoredSamples, workers: int) -> None:
    assert loaded(stored, workers) == (np.arange(COUNT) + 1000).tolist()
    stream = loaded(ShuffledStream(stored, seed=2), workers, drop_last=False)
    assert sorted(stream) == (np.arange(COUNT) + 1000).tolist() != stream


@pytest.mark.long
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_new_processes_read_storage(stored: StoredSamples, start: str) -> None:
    assert loaded(stored, 2, start) == (np.arange(COUNT) + 1000).tolist()
    assert sorted(loaded(ShuffledStream(stored), 2, start)) == (np.arange(COUNT) + 1000).tolist()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_workers_read_their_checkpoint_while_the_buffer_changes(tmp_path: Path, start: str, kind: str) -> None:
    """Samples come, replace others, swap and are forgotten; what workers read is as of the checkpoint."""

    def columns(ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": ids[:, None] * 1000 + np.arange(600)}  # whole pages are read into rows

    with CarouselBuffer(tmp_path / "b", memory=32, storage=300, schema={"x": ("int64", (600,))}, seed=2) as buffer:
        buffer.add(columns(np.arange(900)), labels=np.arange(900) % 5)
        buffer.checkpoint()
        for turn in range(2):
            with buffer.dataset() as stored:
                wanted = sorted(stored.ids.tolist())
                dataset = stored if kind == "map" else ShuffledStream(stored)
                buffer.feedback(buffer.sample(16))  # reads are under way as workers begin
                loader = torch.utils.data.DataLoader(
                    dataset, batch_size=16, num_workers=2, multiprocessing_context=start, shuffle=kind == "map" or None
                )
                read: list[int] = []
                for number, batch in enumerate(loader):
                    ids = batch["ids"].numpy()
                    assert (batch["x"].numpy() == columns(ids)["x"]).all()
                    read += ids.tolist()
                    new = np.arange(30) + 1000 * (1 + number) + 10**6 * (1 + turn)
                    buffer.add(columns(new), labels=new % 5, ids=new)
                    buffer.feedback(buffer.sample(16))
                    if number % 4 == 3:
                        buffer.checkpoint()
                assert sorted(read) == wanted
            buffer.checkpoint()
        assert buffer.check() == []


def test_a_copy_sent_elsewhere_reads_the_same_checkpoint_or_refuses(place: Path) -> None:
    with CarouselBuffer.open(place) as buffer:
        with buffer.dataset() as stored:
            sent = pickle.dumps(stored)
            with pickle.loads(sent) as copy:
                assert copy.ids.tolist() == stored.ids.tolist()
                assert copy[3]["ids"] == stored[3]["ids"]
            buffer.add({"x": np.zeros((1, 2, 3), np.float32), "labels": np.zeros(1, np.int16)}, labels=[0])
            assert len(stored) == COUNT
        buffer.checkpoint()
        with pytest.raises(RuntimeError, match="newer checkpoint"):
            pickle.loads(sent)
        with buffer.dataset() as stored:
            assert len(stored) == COUNT + 1


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.75])
def test_a_mixture_has_its_share_of_replayed_samples(stored: StoredSamples, share: float) -> None:
    base = list(range(90))
    mixed = MixedDataset(base, stored, share, seed=4, transform=lambda sample: -int(sample["ids"]))
    passes = []
    for epoch in range(4):
        mixed.set_epoch(epoch)
        items = [mixed[index] for index in range(len(mixed))]
        assert items[:90] == base
        assert len(items) - 90 == round(90 * share / (1 - share))
        assert items == mixed.__getitems__(range(len(mixed)))
        passes.append(items[90:])
    replayed = [item for items in passes for item in items]
    # Every stored sample has its turn before any has a second one.
    for start in range(0, len(replayed) - COUNT + 1, COUNT):
        assert len(set(replayed[start : start + COUNT])) == COUNT
    again = MixedDataset(base, stored, share, seed=4, transform=lambda sample: -int(sample["ids"]))
    again.set_epoch(3)
    assert [again[index] for index in range(90, len(again))] == passes[3]
    with pytest.raises(IndexError):
        mixed[len(mixed)]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_workers_that_stay_alive_follow_the_passes(stored: StoredSamples, start: str, kind: str) -> None:
    mixed = MixedDataset([0] * 90, stored, 0.1, seed=4, transform=label_of_sample)
    dataset = mixed if kind == "map" else ShuffledStream(mixed, seed=3)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=8, num_workers=2, persistent_workers=True, multiprocessing_context=start
    )
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        again = MixedDataset([0] * 90, stored, 0.1, seed=4, transform=label_of_sample)
        alone = again if kind == "map" else ShuffledStream(again, seed=3)
        alone.set_epoch(epoch)
        items = [int(item) for batch in loader for item in batch]
        assert sorted(items) == sorted([alone[i] for i in range(len(alone))] if kind == "map" else [*alone])
        assert len(set(items)) == 11


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_ranks_that_get_one_mixture_choose_their_own_passes(stored: StoredSamples, start: str, kind: str) -> None:
    mixed = MixedDataset([0] * 90, stored, 0.1, seed=4, transform=label_of_sample)
    dataset = mixed if kind == "map" else ShuffledStream(mixed, seed=3)
    dataset.set_epoch(2)
    items = items_of(dataset)
    context: Any = torch.multiprocessing.get_context(start)
    told, tell = context.Pipe(duplex=False)
    rank = context.Process(target=train_a_rank, args=(dataset, tell))
    rank.start()
    tell.close()  # a rank that dies is an EOFError here
    found = told.recv()
    rank.join()
    assert items_of(dataset) == items  # the other rank is in a later pass
    dataset.set_epoch(3)
    assert found == items_of(dataset)


def train_a_rank(dataset: Any, tell: Any) -> None:
    dataset.set_epoch(3)
    tell.send(items_of(dataset))


def items_of(dataset: Any) -> list[int]:
    return [*dataset] if isinstance(dataset, ShuffledStream) else [dataset[index] for index in range(len(dataset))]


def label_of_sample(sample: Any) -> int:
    return int(sample["ids"])


def test_mixtures_of_nothing_and_unfit_shares() -> None:
    assert len(MixedDataset([1, 2], [], 0.5)) == 2
    assert len(MixedDataset([], [1, 2], 0.5)) == 0
    for share in (1, -0.1, 2):
        with pytest.raises(ValueError, match="share"):
            MixedDataset([1], [2], share)


@pytest.mark.filterwarnings("ignore")  # its own, of pickling
def test_hugging_face_datasets_go_in_and_out(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs memhier[datasets]")
    schema = {"text": Field("uint8", (None,), longest=9), "v": ("float32", 3), "n": "int64"}
    rows = datasets.Dataset.from_dict({
        "text": [f"word {number}".encode() for number in range(50)],
        "v": [[number, 0.5, -number] for number in range(50)], "n": list(range(50)),
        "class": [number % 3 for number in range(50)], "other": ["x"] * 50,
    })  # fmt: skip
    with CarouselBuffer(tmp_path / "b", memory=4, schema=schema) as buffer:
        assert add_rows(buffer, rows, labels="class", batch=7) == 50
        assert add_rows(buffer, rows.to_iterable_dataset(), labels="class") == 50
        with pytest.raises(ValueError, match="missing"):
            add_rows(buffer, rows, labels="missing")
        buffer.checkpoint()
        with buffer.dataset() as stored:
            back = to_huggingface(stored)
    assert back["n"][:] == list(range(50)) * 2
    assert back["labels"][:] == [number % 3 for number in range(50)] * 2
    assert bytes(back[7]["text"]) == b"word 7"
    assert back[7]["v"] == [7, 0.5, -7]


def test_rows_of_any_source_of_batches_are_added(tmp_path: Path) -> None:
    class Rows:
        def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
            for start in range(0, 10, batch_size):
                numbers = list(range(start, min(10, start + batch_size)))
                yield {"n": numbers, "v": [[number] * 3 for number in numbers]}

    with CarouselBuffer(tmp_path / "b", memory=4, schema={"v": ("float32", 3), "n": "int64"}) as buffer:
        assert add_rows(buffer, Rows(), batch=4) == 10
        with pytest.raises(ValueError, match="class"):
            add_rows(buffer, Rows(), labels="class")
        buffer.checkpoint()
        with buffer.dataset() as stored:
            assert [(int(sample["n"]), sample["v"].tolist()) for sample in stored] == [
                (number, [number] * 3) for number in range(10)
            ]
