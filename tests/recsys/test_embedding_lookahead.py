"""lookahead: the same bits, fewer reads, and nothing left behind however an epoch ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torch.utils.data import _utils as torch_workers

from memhier.errors import BudgetError
from memhier.planning.plan import plan
from memhier.policies import LRU, Belady
from memhier.recsys import Adagrad, CTRBatch, EmbeddingBag, EmbeddingBagCollection, EmbeddingBagConfig, lookahead

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 400, 8


def batches(count: int, size: int = 16, seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy((ROWS * rng.random((size, 2)) ** 2).astype(np.int64)) for _ in range(count)]


def make(path: Path, slots: int = 80, **options: Any) -> EmbeddingBag:
    options = {"mode": "sum", "optimizer": Adagrad(lr=0.1), "policy": Belady(slots), "dram": "64MiB"} | options
    return EmbeddingBag(ROWS, DIM, path=path, **options)


def train(bag: nn.Module, loader: Any) -> list[float]:
    losses = []
    for batch in loader:
        loss = bag(batch).sin().sum()
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("window", [0, 1, 50, None, "auto"])
def test_looking_ahead_changes_no_bit(tmp_path: Path, window: Any) -> None:
    loader = [batch[: number % 5 * 4] for number, batch in enumerate(batches(60))]  # every fifth without a sample
    with make(tmp_path / "plain", slots=ROWS) as plain:
        expected = train(plain, loader)
        weights = plain.weights(np.arange(ROWS))
    with make(tmp_path / "ahead") as bag:
        assert train(bag, lookahead(loader, bag, ids=lambda batch: batch, window=window)) == expected
        assert torch.equal(bag.weights(np.arange(ROWS)), weights)
        assert bag.stats()["refetches"] + bag.stats()["queue_hits"] > 0


def test_reads_are_those_of_belady_offline(tmp_path: Path) -> None:
    loader = batches(80)
    steps = [*plan([np.unique(batch) for batch in loader], 150, lookahead=None)]
    with make(tmp_path, slots=150) as bag:
        train(bag, lookahead(loader, bag, ids=lambda batch: batch, window=None, prefetch=1))
        stats = bag.stats()
    found = stats["refetches"] + stats["queue_hits"] + stats["first_touches"]
    # A step's rows are still held when the next one's are fetched: a few evictions are not Belady's first choice.
    least = sum(len(step.load) for step in steps)
    assert least <= found <= 1.05 * least


def test_the_same_rows_are_read_in_every_run(tmp_path: Path) -> None:
    seen = set()
    for run in range(3):
        with make(tmp_path / str(run)) as bag:
            train(bag, lookahead(batches(60), bag, ids=lambda batch: batch, window=7))
            stats = bag.stats()
            seen.add((stats["evictions"], stats["misses"], stats["writes"]))
    assert len(seen) == 1


def test_a_step_that_fills_the_budget_is_not_fetched_ahead(tmp_path: Path) -> None:
    loader = batches(12, size=40)
    largest = max(len(np.unique(batch)) for batch in loader)
    with make(tmp_path / "a", slots=ROWS) as plain:
        expected = train(plain, loader)
    with make(tmp_path / "b", slots=largest) as bag:
        assert train(bag, lookahead(loader, bag, ids=lambda batch: batch)) == expected


def test_a_step_beyond_the_budget_says_so_after_those_before_it(tmp_path: Path) -> None:
    loader = [*batches(3, size=4), torch.arange(0, 60).view(30, 2)]
    with make(tmp_path, slots=20) as bag:
        ahead = lookahead(loader, bag, ids=lambda batch: batch)
        with pytest.raises(BudgetError, match="60 distinct rows"):
            train(bag, ahead)
        assert ahead.position == 3
        train(bag, batches(2, size=4))


def test_an_error_of_the_loader_comes_in_its_turn(tmp_path: Path) -> None:
    def loader() -> Iterator[Tensor]:
        yield from batches(4)
        raise RuntimeError("the disk of the data is gone")

    with make(tmp_path) as bag:
        ahead = lookahead(loader(), bag, ids=lambda batch: batch)
        with pytest.raises(RuntimeError, match="disk of the data"):
            train(bag, ahead)
        assert ahead.position == 4
        bag.checkpoint()


@pytest.mark.parametrize("bad", [torch.tensor([[ROWS]]), torch.tensor([[-1]])])
def test_a_wrong_id_comes_in_its_turn(tmp_path: Path, bad: Tensor) -> None:
    with make(tmp_path) as bag:
        epoch = iter(lookahead([*batches(2), bad, *batches(2)], bag, ids=lambda batch: batch))
        next(epoch)
        next(epoch)
        with pytest.raises(IndexError, match="expected a row of table"):
            next(epoch)


def test_an_epoch_may_be_left_and_begun_anew(tmp_path: Path) -> None:
    loader = batches(20)
    with make(tmp_path / "a", slots=ROWS) as plain:
        expected = [*train(plain, loader[:5]), *train(plain, loader[:2]), *train(plain, loader)]
    with make(tmp_path / "b") as bag:
        losses = []
        ahead = lookahead(loader, bag, ids=lambda batch: batch)
        for number, batch in enumerate(ahead):
            if number == 5:
                break
            losses += train(bag, [batch])
        assert ahead.position == 6
        losses += train(bag, loader[:2])
        losses += train(bag, ahead)
        assert losses == expected


def test_another_loaders_epoch_ends_the_one_before(tmp_path: Path) -> None:
    with make(tmp_path / "plain", slots=ROWS) as plain:
        expected = train(plain, batches(2)) + train(plain, batches(40, seed=1))
        weights = plain.weights(np.arange(ROWS))
    with make(tmp_path / "ahead") as bag:
        left = iter(lookahead(batches(40), bag, ids=lambda batch: batch, window=4))
        losses = [train(bag, [next(left)])[0] for _ in range(2)]
        for number, batch in enumerate(lookahead(batches(40, seed=1), bag, ids=lambda batch: batch, window=4)):
            if number == 20:
                with pytest.raises(RuntimeError, match="another epoch"):
                    next(left)
                del left  # it ends anew, and takes nothing from the other
            losses += train(bag, [batch])
        assert losses == expected
        assert torch.equal(bag.weights(np.arange(ROWS)), weights)


def test_other_ids_than_were_said_are_refused(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        epoch = iter(lookahead(batches(5), bag, ids=lambda batch: batch))
        batch = next(epoch)
        with pytest.raises(RuntimeError, match="other ids"):
            bag(batch + 1)
        bag(batch).sum().backward()
        del epoch
        bag(batch + 1).sum().backward()


def test_evaluation_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        for batch in lookahead(batches(10), bag, ids=lambda batch: batch):
            bag(batch).sum().backward()
            bag.eval()
            held_out = batches(1, seed=9)[0]
            assert torch.equal(bag(held_out), bag.weights(held_out.numpy()).sum(1))
            bag.train()


class Ids(Dataset[Tensor]):
    def __len__(self) -> int:
        return 300

    def __getitem__(self, at: int) -> Tensor:
        return torch.tensor([at % 7, at])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seeded_loader_is_resumed_in_the_middle(tmp_path: Path, workers: int) -> None:
    def loader() -> DataLoader[Tensor]:
        return DataLoader(Ids(), 16, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3))

    whole = [batch.tolist() for batch in loader()]
    with make(tmp_path) as bag:
        ahead = lookahead(loader(), bag, ids=lambda batch: batch)
        seen = []
        for batch in ahead:
            bag(batch).sum().backward()
            seen.append(batch.tolist())
            if len(seen) == 7:
                break
        bag.checkpoint({"loader": ahead.state_dict()})
    with make(tmp_path, resume=True) as bag:
        other = loader()
        assert other.generator is not None
        other.generator.manual_seed(99)
        ahead = lookahead(other, bag, ids=lambda batch: batch)
        ahead.load_state_dict(bag.extra["loader"])
        assert ahead.position == 7
        for batch in ahead:
            bag(batch).sum().backward()
            seen.append(batch.tolist())
        assert ahead.position == len(whole)
    assert seen == whole


@pytest.fixture
def silent_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch find a dead worker when it waits for it, not by a signal that raises between any two lines."""
    monkeypatch.setattr(torch_workers.signal_handling, "_set_SIGCHLD_handler", lambda: None)
    monkeypatch.setattr(torch_workers, "MP_STATUS_CHECK_INTERVAL", 0.2)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    # Reaps the dead one, for which torch would blame the next loader of this process at any child's end.
    multiprocessing.active_children()
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.long
@pytest.mark.usefixtures("silent_workers")
def test_a_worker_that_dies_is_an_error_in_its_turn(tmp_path: Path) -> None:
    class Deadly(Ids):
        def __getitem__(self, at: int) -> Tensor:
            if at == 100:
                os._exit(1)
            return super().__getitem__(at)

    with make(tmp_path) as bag:
        # torch's own error, or one from a batch that the worker had still to hand over.
        with pytest.raises((RuntimeError, OSError, EOFError)):
            train(bag, lookahead(DataLoader(Deadly(), 8, num_workers=1), bag, ids=lambda batch: batch))
        assert len(train(bag, batches(2))) == 2


def test_other_policies_cannot_look_ahead(tmp_path: Path) -> None:
    with make(tmp_path, policy=LRU(50)) as bag:
        with pytest.raises(ValueError, match="policy='belady'"):
            lookahead(batches(1), bag, ids=lambda batch: batch)
        with pytest.raises(ValueError, match="found none"):
            lookahead(batches(1), nn.Linear(1, 1), ids=lambda batch: batch)
        with pytest.raises(ValueError, match="window=-1"):
            lookahead(batches(1), bag, ids=lambda batch: batch, window=-1)


def test_a_collection_looks_ahead_for_all_its_tables(tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=50, embedding_dim=4),
        EmbeddingBagConfig(name="b", num_embeddings=90, embedding_dim=6, pooling="mean"),
    ]
    loader = [torch.stack([torch.randint(50, (9,)), torch.randint(90, (9,))], 1) for _ in range(20)]
    found = []
    for number, slots in enumerate((140, 30)):
        with EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / str(number), policy=Belady(slots)) as tables:
            for batch in lookahead(loader, tables, ids=lambda batch: batch) if number else loader:
                tables(batch).values().sin().sum().backward()
            found.append([tables.weights(np.arange(count), table) for table, count in enumerate((50, 90))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Looped:
    """A batch that knows itself."""

    def __init__(self, labels: Tensor, dense: Tensor, ids: Tensor) -> None:
        self.labels, self.dense, self.ids, self.itself = labels, dense, ids, self


@pytest.mark.parametrize("kind", [SimpleNamespace, CTRBatch, Looped])
def test_what_waits_stays_within_its_part_of_the_budget(tmp_path: Path, kind: Any) -> None:
    """Batches of half a MiB, in 4 MiB of the 64: those being fetched or trained on take three places."""
    loader = [kind(labels=torch.zeros(2**16), dense=torch.zeros(2**16), ids=batch) for batch in batches(40)]
    with make(tmp_path) as bag:
        assert bag.tables.window_bytes == 4 * 2**20
        ahead = lookahead(loader, bag, ids=lambda batch: batch.ids)
        most = 0.0
        for batch in ahead:
            bag(batch.ids).sum().backward()
            most = max(most, ahead.stats()["bytes"])
        # One more may have been read when the others were under the limit.
        assert 2**21 <= most <= bag.tables.window_bytes + 2**20
        assert 2 < ahead.stats()["window"] < 7


def test_the_room_for_batches_is_part_of_the_budget(tmp_path: Path) -> None:
    with EmbeddingBag(10**7, 8, dram="64MiB", path=tmp_path, touched=10**5) as bag:
        assert bag.memory_bytes <= 56 * 2**20


def test_gradients_add_up_over_batches_known_ahead(tmp_path: Path) -> None:
    loader = batches(24)
    found = []
    for number, window in enumerate((0, 3, None)):
        with make(tmp_path / str(number), slots=150, update="step") as bag:
            for count, batch in enumerate(lookahead(loader, bag, ids=lambda batch: batch, window=window), 1):
                bag(batch).sin().sum().backward()
                if count % 3 == 0:
                    bag.optimizer.step()
            found.append(bag.weights(np.arange(ROWS)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with make(tmp_path / "plain", slots=ROWS, update="step") as bag:
        for count, batch in enumerate(loader, 1):
            bag(batch).sin().sum().backward()
            if count % 3 == 0:
                bag.optimizer.step()
        assert torch.equal(bag.weights(np.arange(ROWS)), found[0])


def test_an_end_within_ids_is_not_the_loaders(tmp_path: Path) -> None:
    with make(tmp_path) as bag, pytest.raises(RuntimeError, match="ids: raised StopIteration"):
        train(bag, lookahead(batches(3), bag, ids=lambda batch: next(iter([]))))


def test_ids_that_are_changed_in_place_are_other_ids(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        epoch = iter(lookahead(batches(3), bag, ids=lambda batch: batch))
        batch = next(epoch)
        batch.fill_(5)
        with pytest.raises(RuntimeError, match="other ids"):
            bag(batch)


def test_a_sampler_within_a_sampler_of_batches_is_resumed(tmp_path: Path) -> None:
    def loader(seed: int) -> DataLoader[Tensor]:
        order = RandomSampler(Ids(), generator=torch.Generator().manual_seed(seed))
        return DataLoader(Ids(), batch_sampler=BatchSampler(order, 16, drop_last=False))

    whole = [batch.tolist() for batch in loader(3)]
    with make(tmp_path) as bag:
        ahead = lookahead(loader(3), bag, ids=lambda batch: batch)
        seen = []
        for batch in ahead:
            seen.append(batch.tolist())
            if len(seen) == 7:
                break
        again = lookahead(loader(99), bag, ids=lambda batch: batch)
        again.load_state_dict(ahead.state_dict())
        seen += [batch.tolist() for batch in again]
    assert seen == whole


def test_an_epoch_that_is_left_lets_the_loader_go(tmp_path: Path) -> None:
    ended = threading.Event()

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            try:
                yield from batches(60)
            finally:
                ended.set()

    with make(tmp_path) as bag:
        ahead = lookahead(Loader(), bag, ids=lambda batch: batch)
        for _ in ahead:
            break
        assert ended.wait(600)  # the thread that no interrupt reaches ends it
        assert ahead.position == 1


class _Counted:
    """An `ids` of a few milliseconds that counts how many of its calls run at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = self.most = 0

    def __call__(self, batch: Tensor) -> Tensor:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        threading.Event().wait(0.02)
        with self._lock:
            self._running -= 1
        return batch


def test_an_epoch_begins_when_the_one_before_has_ended(tmp_path: Path) -> None:
    # Two ranks whose threads read for two epochs at once would take each other's messages.
    loader, ids = batches(10), _Counted()
    with make(tmp_path / "t") as bag:
        for _ in range(4):
            for batch in lookahead(loader, bag, ids=ids):
                bag(batch).sum().backward()
                break
    assert ids.most == 1


def test_an_epoch_within_another_ends_that_one_aloud(tmp_path: Path) -> None:
    loader = batches(10)
    with make(tmp_path / "t") as bag:
        outer = iter(lookahead(loader, bag, ids=lambda batch: batch))
        bag(next(outer)).sum().backward()
        with torch.no_grad():
            inner = [bag(batch).sum().item() for batch in lookahead(loader, bag, ids=lambda batch: batch)]
            assert inner == [bag(batch).sum().item() for batch in loader]
        with pytest.raises(RuntimeError, match="another epoch of lookahead began"):
            next(outer)
        assert list(outer) == []
