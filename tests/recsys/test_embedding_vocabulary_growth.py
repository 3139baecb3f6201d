"""Tables for ids whose number is not known: maps grow as ids come, and tables get more rows at a resume."""

import errno
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from memhier import BudgetError, FormatError, RowLog
from memhier.recsys import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Hash64,
    Normal,
    TableReader,
    export_parquet,
    lookahead,
)
from memhier.recsys.embedding import growing

pq: Any = pytest.importorskip("pyarrow.parquet")
torch.set_num_threads(1)

BILLION = 10**9
rng = np.random.default_rng(0)
NAMES = rng.integers(-(2**63), 2**63 - 1, 6000)


def batches_of(count: int, most: int, seed: int = 0) -> list[torch.Tensor]:
    random = np.random.default_rng(seed)
    return [
        torch.from_numpy(NAMES[: max(8, most * (step + 1) // count)])[
            torch.from_numpy((max(8, most * (step + 1) // count) * random.random((40, 5))).astype(np.int64))
        ]
        for step in range(count)
    ]


def train(bag: Any, batches: Any) -> list[float]:
    losses = []
    for ids in batches:
        loss = bag(ids).sin().square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def make(path: Path, rows: int, **options: Any) -> EmbeddingBag:
    given: dict[str, Any] = {"mode": "sum", "optimizer": Adagrad(lr=0.1), "dram": "32MiB", "id_space": "hash64"}
    return EmbeddingBag(rows, 4, path=path, **(given | options))


def state_of(bag: Any, table: int = 0) -> list[Any]:
    ids = torch.cat([*bag.ids(table)])
    return [ids.tolist(), bag.weights(ids, table).tolist(), bag.optimizer_state(ids, table).tolist()]


@pytest.mark.parametrize("rules", [Hash64(), Hash64(admit_after=2, expire_after=9, sketch=2**14)])
def test_a_billion_rows_for_any_ids_train_as_few_do_and_take_room_as_ids_come(tmp_path: Path, rules: Hash64) -> None:
    batches = batches_of(30, 4000)
    trained = []
    for name, rows in (("few", 5000), ("many", BILLION)):
        with make(tmp_path / name, rows, id_space=rules) as bag:
            maps = bag.tables.vocabularies
            assert maps is not None
            first = maps.memory_bytes
            losses = train(bag, lookahead(batches[:20], bag, ids=lambda ids: ids))
            bag.checkpoint()
            assert (maps.memory_bytes > first) == (rows == BILLION)
        with make(tmp_path / name, rows, id_space=rules, resume=True) as bag:
            losses += train(bag, batches[20:])
            assert bag.memory_bytes < 32 * 2**20
            trained.append((losses, state_of(bag)))
            bag.checkpoint()
    assert trained[0] == trained[1]
    with TableReader(tmp_path / "many", dram="32MiB") as served, TableReader(tmp_path / "few", dram="32MiB") as few:
        asked = torch.from_numpy(NAMES)
        assert torch.equal(served.rows(asked), few.rows(asked))


def test_room_for_ids_ends_with_words_and_a_resume_with_more_dram_goes_on(tmp_path: Path) -> None:
    names = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 140_000)
    with make(tmp_path, BILLION, dram="32MiB", touched=140_000) as bag:
        for part in np.array_split(names[:131000], 130):
            train(bag, [torch.from_numpy(part)[:, None]])
        before, steps = state_of(bag), list(bag.tables.record.steps)
        many = torch.from_numpy(names[130700:131700])[:, None]
        with pytest.raises(BudgetError, match="has room for 131072 with a row, and this step has new ones") as caught:
            bag(many)
        with pytest.raises(BudgetError, match="has room for 131072"):
            train(bag, lookahead([many[:100], many], bag, ids=lambda ids: ids))
        assert bag.tables.record.steps == [steps[0] + 1]
        assert state_of(bag)[0] == before[0]
        train(bag, [many[:300]])  # ids that have rows
        before = state_of(bag)
        bag.checkpoint()
    found = re.search(r"resume=True and dram=(\d+)\.", str(caught.value))
    assert found is not None
    with make(tmp_path, BILLION, dram=int(found[1]), resume=True) as bag:
        assert state_of(bag) == before
        train(bag, [many])
        assert bag.contains(names[:131700]).all()
        bag.checkpoint()
    with pytest.raises(BudgetError, match=r"too little for the map of the 131700 ids.* dram=\d+ would be enough"):
        make(tmp_path, BILLION, dram="32MiB", resume=True)


def test_a_sketch_for_a_billion_rows_is_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"the sketches of admit_after take .*Hash64\(sketch=...\)"):
        make(tmp_path / "a", BILLION, id_space=Hash64(admit_after=2))
    with make(tmp_path / "a", BILLION, id_space=Hash64(admit_after=2, sketch=2**16)) as bag:
        train(bag, batches_of(3, 100))


def collection(
    path: Path, any_rows: int, words_rows: int, sketch: int | None = None, **options: Any
) -> EmbeddingBagCollection:
    spaces: list[Any] = [Hash64(admit_after=2, sketch=sketch), Hash64(expire_after=6, evict="lfu")]
    sizes: list[Any] = [
        ("known", 50, 3, "rows"), ("any", any_rows, 5, spaces[0]), ("wide", 60_000, 40, "rows"),
        ("words", words_rows, 5, spaces[1]), ("last", 70, 5, "rows"),
    ]  # fmt: skip
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, id_space=space, initial=Normal())
        for name, rows, dim, space in sizes
    ]
    return EmbeddingBagCollection(configs, dram="64MiB", path=path, optimizer=Adam(lr=0.01), **options)


def features_of(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "known": torch.from_numpy(random.integers(0, 50, (6, 2))),
        "any": torch.from_numpy(NAMES[random.integers(0, 130, (6, 3))]),
        "wide": torch.from_numpy(random.integers(0, 60_000, (6, 2))),
        "words": torch.from_numpy(NAMES[random.integers(0, 60, (6, 2))]),
        "last": torch.from_numpy(random.integers(0, 70, (6, 1))),
    }


def whole_of(tables: Any) -> list[Any]:
    found: list[Any] = []
    for table, spec in enumerate(tables.specs):
        if spec.id_space is None:
            every = torch.arange(0, spec.rows, 1 if spec.rows < 100 else 31)
            found.append([tables.weights(every, table).tolist(), tables.optimizer_state(every, table).tolist()])
        else:
            found += [state_of(tables, table), tables.tables.read_unknown(table).tolist()]
    return found


def train_collection(tables: Any, seeds: list[int]) -> list[float]:
    losses = []
    for seed in seeds:
        loss = tables(features_of(seed)).values().sin().square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sizes", [(90, 41), (900, 35), (33, 700), (400, 300)])
def test_tables_that_grow_go_on_as_if_they_had_been_larger(tmp_path: Path, sizes: tuple[int, int]) -> None:
    # None is full before it grows.
    with collection(tmp_path / "grown", 33, 35) as tables:
        losses = train_collection(tables, [0, 1, 2])
        before = whole_of(tables)
        tables.checkpoint({"at": 3})
    with collection(tmp_path / "grown", *sizes, resume=True) as tables:
        assert whole_of(tables) == before
        assert tables.extra == {"at": 3}
        losses += train_collection(tables, [*range(20, 26)])
        tables.checkpoint()
    with collection(tmp_path / "grown", *sizes, resume=True) as tables:
        losses += train_collection(tables, [*range(26, 40)])
        after = whole_of(tables)
        assert tables.memory_bytes <= 64 * 2**20
    sketch = Hash64(admit_after=2).cells(33)  # it stays as it was
    with collection(tmp_path / "whole", *sizes, sketch=sketch) as tables:
        assert losses == train_collection(tables, [0, 1, 2, *range(20, 40)])
        assert whole_of(tables) == after


@pytest.mark.parametrize("options", [
    {"padding_idx": 3}, {"optimizer": Adagrad(lr=0.5)}, {"policy": "none"}, {"dram": "3MiB"}, {"step_rows": 10**8},
    {"touched": 2 * 10**9}, {"touched": 1}, {"codec": "fp16", "optimizer": SGD(lr=0.1)},
], ids="-".join)  # fmt: skip
def test_arguments_that_are_refused_leave_the_tables_as_large_as_they_were(tmp_path: Path, options: Any) -> None:
    optimizer = SGD(lr=0.1) if "codec" in options else Adagrad(lr=0.1)
    with make(tmp_path, 100, optimizer=optimizer) as bag:
        train(bag, batches_of(3, 50))
        bag.checkpoint()
    with pytest.raises((BudgetError, FormatError, ValueError)) as caught:
        make(tmp_path, 5000, resume=True, **options)
    make(tmp_path, 100, resume=True, optimizer=optimizer).close()
    enough = re.search(r"dram=(\d+) would be enough", str(caught.value))
    assert (enough is not None) == (isinstance(caught.value, BudgetError) and options != {"touched": 1})
    if enough is not None:
        make(tmp_path, 5000, resume=True, **(options | {"dram": int(enough[1])})).close()


def any_tables(dims: list[int], path: Path, dram: int | str, **options: Any) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t{table}", num_embeddings=BILLION, embedding_dim=dim, id_space="hash64")
        for table, dim in enumerate(dims)
    ]
    return EmbeddingBagCollection(configs, dram=dram, path=path, optimizer=SGD(lr=0.1), **options)


def test_a_refused_step_gives_back_the_room_that_it_took(tmp_path: Path) -> None:
    names = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 200_000)
    with any_tables([4, 4], tmp_path, "32MiB") as tables:
        maps, few, many = tables.tables.vocabularies, names[:1000], names[50_000:]
        assert maps is not None
        assert maps.map([[few, few]]).frames == 1
        held = maps.memory_bytes
        for ids in ([few, many], [many, few], [names[:50_000], many]):  # the last: one table has room, the other none
            with pytest.raises(BudgetError, match="map of ids has room for"):
                tables.tables.map_ids([ids])
            assert maps.memory_bytes == held
        maps.drop()
        mapped = tables.tables.map_ids([[names[:60_000], names[:60_000]]])
        assert [rows.tolist() for rows in mapped.rows] == [list(range(60_000))] * 2
        assert maps.memory_bytes > held


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_with_too_many_rows_gives_back_the_room_for_its_ids(tmp_path: Path, ahead: bool) -> None:
    names = torch.from_numpy(np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 50_000))[:, None]
    with make(tmp_path, BILLION, step_rows=2000) as bag:
        maps, batches = bag.tables.vocabularies, [names[:100], names]
        assert maps is not None
        train(bag, batches[:1])
        held = maps.memory_bytes
        with pytest.raises(BudgetError, match="step_rows=50000"):
            train(bag, lookahead(batches, bag, ids=lambda ids: ids) if ahead else batches)
        assert maps.memory_bytes == held
        train(bag, names.split(1000))
        assert bag.contains(names).all()


@pytest.mark.parametrize("dims", [[8], [4, 8], [4, 8, 16, 32], [4] * 60])
def test_a_billion_rows_of_several_widths_take_no_more_dram(tmp_path: Path, dims: list[int]) -> None:
    with pytest.raises(BudgetError, match="would be enough") as caught:
        any_tables(dims, tmp_path / "a", "12MiB").close()
    enough = re.search(r"dram=(\d+) would be enough", str(caught.value))
    assert enough is not None
    assert int(enough[1]) < 90 * 2**20
    with any_tables(dims, tmp_path / "b", int(enough[1])) as tables:
        tables({f"t{table}": torch.from_numpy(NAMES[:2, None]) for table in range(len(dims))}).values().sum().backward()
        assert tables.memory_bytes < int(enough[1])
        tables.checkpoint()


def test_many_small_tables_get_no_more_ids_than_their_log_has_room_for(tmp_path: Path) -> None:
    count, given = 200, 0
    names = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, (150, count, 6, 1))

    def train_all(tables: EmbeddingBagCollection) -> None:
        nonlocal given
        for step in names:
            tables({f"t{table}": torch.from_numpy(step[table]) for table in range(count)}).values().sum().backward()
            given += count * 6

    with any_tables([4] * count, tmp_path, "32MiB", touched=140_000) as tables:
        with pytest.raises(BudgetError, match="has room for 131072 with a row"):
            train_all(tables)
        assert 100_000 < given <= 131072
        tables.checkpoint()
    with any_tables([4] * count, tmp_path, "32MiB", touched=140_000, resume=True) as tables:
        assert sum(len(block) for table in range(count) for block in tables.ids(table)) == given


@pytest.mark.parametrize(("window", "touched"), [(0, None), ("auto", 140_000)])
def test_a_loop_of_lookahead_goes_on_at_the_batch_without_room(
    tmp_path: Path, window: Any, touched: int | None
) -> None:
    # Without `touched` the index of rows is full first where the core is compiled, and then the map of ids.
    names = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, (136, 1000, 1))
    batches = [torch.from_numpy(part) for part in names]
    with make(tmp_path / "whole", BILLION, dram="128MiB") as bag:
        losses, after = train(bag, batches), state_of(bag)
    dram: int | str = "32MiB"
    found, state, shortages = list[float](), dict[str, Any](), 0
    while len(found) < len(batches):
        with make(tmp_path / "a", BILLION, dram=dram, touched=touched, resume=shortages > 0) as bag:
            ahead = lookahead(batches, bag, ids=lambda ids: ids, window=window)
            if shortages:
                ahead.load_state_dict(bag.extra)
            try:
                for ids in ahead:
                    found += train(bag, [ids])
            except BudgetError as error:
                state = ahead.state_dict()
                assert state["position"] == len(found)
                bag.checkpoint(state)
                told = re.search(r"dram=(\d+)\.? ", str(error).split("resume=True")[1])
                dram = dram if told is None else int(told[1])
                shortages += 1
            else:
                assert state_of(bag) == after
    assert 1 <= shortages <= 2
    assert found == losses


@pytest.mark.parametrize("fault", ["append 1", "append 3", "delete 2", "commit 1", "check 2"])
def test_a_growth_that_fails_changes_nothing(tmp_path: Path, fault: str) -> None:
    with collection(tmp_path, 33, 35) as tables:
        losses = train_collection(tables, [0, 1])
        tables.checkpoint()
        before = whole_of(tables)
    name, count = fault.split()
    calls = 0

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(count):
            raise KeyboardInterrupt if name == "check_interrupt" else OSError(errno.ENOSPC, "no space")
        return real(*arguments, **options)

    where: Any = growing if name == "check" else RowLog
    name = "check_interrupt" if name == "check" else name
    real = getattr(where, name)
    with (
        mock.patch.object(where, name, fails),
        pytest.raises(KeyboardInterrupt if name == "check_interrupt" else OSError),
    ):
        collection(tmp_path, 200, 400, resume=True)
    assert calls == int(count)
    for sizes in ((33, 35), (200, 400)):
        with collection(tmp_path, *sizes, resume=True) as tables:
            assert whole_of(tables) == before
    with collection(tmp_path, 200, 400, resume=True) as tables:
        losses += train_collection(tables, [2, 3, 4])
    with pytest.raises(FormatError, match="'rows': 202"):  # it does not shrink
        collection(tmp_path, 199, 400, resume=True)


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_a_full_table_that_grows_forgets_no_more_and_is_exported_right_after(tmp_path: Path, codec: str) -> None:
    rules = Hash64(evict="lru", pending=1)
    options: dict[str, Any] = {"id_space": rules, "optimizer": SGD(lr=0.1), "codec": codec, "padding_idx": -3}
    with make(tmp_path / "table", 64, **options) as bag:
        train(bag, batches_of(20, 300))
        bag(torch.tensor([[-3, int(NAMES[-1]), int(NAMES[-2])]])).sum().backward()
        bag.checkpoint()
    with make(tmp_path / "table", 64, resume=True, **options) as bag:
        held, unknown = state_of(bag), bag.tables.read_unknown(0)
        assert len(held[0]) > 40
    open_before = TableReader(tmp_path / "table", dram="32MiB")
    with make(tmp_path / "table", 5000, resume=True, **options) as bag:
        export_parquet(bag, tmp_path / "table.parquet")
        assert pq.read_table(tmp_path / "table.parquet")["id"].drop_null().to_pylist() == held[0]
        assert state_of(bag) == held
        assert np.array_equal(bag.tables.read_unknown(0), unknown)
        with TableReader(tmp_path / "table", dram="32MiB") as served:
            assert torch.equal(served.rows(torch.tensor(held[0])), bag.weights(held[0]))
        losses = train(bag, batches_of(20, 300))
        ids = torch.cat([*bag.ids()]).tolist()
        assert {*held[0]} < {*ids}  # none was forgotten
        bag.checkpoint()
        after = state_of(bag)
        with open_before as served, TableReader(tmp_path / "table", dram="32MiB") as opened:
            room = served.stats()["capacity"]
            assert served.refresh()
            assert served.specs == opened.specs
            assert served.stats()["capacity"] > room
            bags = torch.tensor([[-3, ids[0], 2**50], [-3, -3, -3]])
            for read in (lambda one: one.rows(ids), lambda one: one.bags(bags, mode="sum", padding_idx=-3)):
                assert torch.equal(read(served), read(opened))
    with make(tmp_path / "table", 5000, resume=True, **options) as bag:
        assert state_of(bag)[: 1 if codec == "fp16" else 3] == after[: 1 if codec == "fp16" else 3]
    assert np.isfinite(losses).all()
