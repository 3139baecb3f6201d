"""Tables of several widths: rows in groups, with torch's bits, one budget and one checkpoint."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memhier import BudgetError, CorruptionError, FormatError, Store, backend
from memhier.policies import Belady
from memhier.recsys import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Hash64,
    QuantisedTable,
    RowWiseAdagrad,
    ShardedEmbeddingBagCollection,
    TableReader,
    export_quantised,
    export_safetensors,
    lookahead,
)
from memhier.recsys.embedding.groups import row_groups
from memhier.recsys.embedding.groups.row_groups import RowGroups, groups_by_width
from memhier.recsys.embedding.groups.tiers import TierArguments
from memhier.table.tiered import KIND
from tests.recsys.rules import RULES

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]

SCRIPT = Path(__file__).with_name("train_widths_until_killed.py")


@pytest.fixture
def each_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each width a tier of its own, however few its rows are."""
    monkeypatch.setattr(row_groups, "TIER_BYTES", 0)


def configs_of(dims: list[int], rows: list[int]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t{number}", num_embeddings=count, embedding_dim=dim, pooling=("sum", "mean")[number % 2]
        )
        for number, (dim, count) in enumerate(zip(dims, rows, strict=True))
    ]


class InMemory(nn.Module):
    """The same tables in memory."""

    def __init__(self, tables: Any, configs: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.names = [config.name for config in configs]
        self.bags: Any = nn.ModuleList(
            nn.EmbeddingBag(
                config.num_embeddings, config.embedding_dim, mode=config.pooling, sparse=True,
                _weight=tables.initial_weights(np.arange(config.num_embeddings), number),
            )
            for number, config in enumerate(configs)
        )  # fmt: skip

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.cat([bag(batch[name]) for name, bag in zip(self.names, self.bags, strict=True)], 1)


def batches_of(
    configs: list[EmbeddingBagConfig], draw: np.random.Generator, steps: int, samples: int = 12
) -> list[dict[str, Tensor]]:
    """Return batches of skewed ids, of several lengths."""
    found = []
    for _ in range(steps):
        lengths = draw.integers(1, 4, len(configs))
        found.append({
            config.name: torch.from_numpy(
                (config.num_embeddings * draw.random((samples, length)) ** 3).astype(np.int64)
            )
            for config, length in zip(configs, lengths, strict=True)
        })  # fmt: skip
    return found


def assert_equal(tables: Any, memory: InMemory) -> None:
    for number, bag in enumerate(memory.bags):
        assert torch.equal(tables.weights(np.arange(len(bag.weight)), number), bag.weight), number


@pytest.mark.parametrize("seed", range(16))
def test_collections_drawn_at_random_have_torchs_bits(tmp_path: Path, each_width: None, seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(2, 7))
    dims = [int(draw.choice([1, 3, 8, 20, 64])) for _ in range(count)]
    rows = [int(draw.choice([5, 300, 4000])) for _ in range(count)]
    configs, update = configs_of(dims, rows), ("backward", "step")[seed % 2]
    rule, make = RULES[[*RULES][seed % 3]]
    widths = {dim + rule.state_width(dim) for dim in dims}
    # Little room: rows leave, and are written while the training goes on.
    least = 2 if backend.core is not None else 8  # policies of Python take more for a row
    dram = f"{least + 3 * len(widths) + int(draw.integers(0, 3))}MiB"
    options: dict[str, Any] = {"optimizer": rule, "dram": dram, "path": tmp_path, "update": update}
    tables = EmbeddingBagCollection(configs, **options)
    memory = InMemory(tables, configs)
    theirs = make(memory.parameters())
    batches = batches_of(configs, draw, 24)
    saving = None
    for part in (batches[:12], batches[12:]):
        with tables:
            assert len(tables.tables.groups) == len(widths)
            ahead = lookahead(part, tables, ids=lambda batch: [batch, batch]) if seed % 4 < 2 else part
            for number, batch in enumerate(ahead):
                theirs.zero_grad()
                for model in (tables, memory):
                    outputs = [model(batch) if model is memory else model(batch).values() for _ in range(1 + seed % 2)]
                    assert all(torch.equal(outputs[0], output) for output in outputs)
                    sum((output.sin() * (at + 1)).sum() for at, output in enumerate(outputs)).backward()
                tables.optimizer.step()
                theirs.step()
                if number == 5:
                    saving = tables.start_checkpoint({"step": number})
            assert saving is not None
            assert saving.result() > 0
            assert_equal(tables, memory)
            tables.checkpoint()
        tables = EmbeddingBagCollection(configs, **options | {"resume": True, "dram": "32MiB"})
    with tables:
        assert_equal(tables, memory)


def test_tables_of_two_widths_have_one_lookup_of_each(tmp_path: Path, each_width: None) -> None:
    configs = configs_of([4, 40, 4], [200, 300, 5])
    with EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path) as tables:
        assert tables.tables.groups.of.tolist() == [1, 0, 1]
        assert tables.tables.groups.widths == [40, 4]
        tables({"t0": torch.tensor([[1]]), "t1": torch.tensor([[2]]), "t2": torch.tensor([[4]])})
        assert tables.stats()["first_touches"] == 3
        empty = torch.zeros(1, 0, dtype=torch.int64)
        tables({"t0": torch.tensor([[1]]), "t1": empty, "t2": empty}).values().sum().backward()
        assert tables.stats()["resident"] == 3
        assert tables.stats()["capacity"] == 505


def test_few_narrow_rows_go_with_the_wide_ones() -> None:
    assert groups_by_width([8, 128, 64], [1000, 10**5, 1000]) == [0, 0, 0]
    assert groups_by_width([8, 128], [10**5, 10**5]) == [1, 0]
    assert groups_by_width([8, 16, 128], [10**5, 10**5, 7]) == [1, 1, 0]  # 8 MB of padding, then 3
    assert groups_by_width([8, 8], [10**9, 1]) == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_keys_in_groups_go_there_and_back(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 9))
    rows = draw.integers(0, 50, count).tolist()
    rows[int(draw.integers(count))] += 1
    widths = draw.choice([2, 4, 30], count).tolist()
    of = np.unique(widths, return_inverse=True)[1].tolist()
    groups = RowGroups(of, widths, rows)
    keys: NDArray[np.int64] = np.flatnonzero(draw.random(sum(rows)) < 0.6)
    starts = np.searchsorted(keys, groups.bases)
    mixed = draw.permutation(keys)
    for some, parts in ((keys, groups.split(keys, starts)), (mixed, groups.split_any(mixed))):
        assert len(parts) == len(groups)
        seen = np.zeros(len(some), np.int64)
        for group, (places, numbers) in enumerate(parts):
            assert np.array_equal(groups.everywhere(group, numbers), some[places])
            assert ((numbers >= 0) & (numbers < groups.rows[group])).all()
            seen[places] += 1
        assert (seen == 1).all()
    for table, end in enumerate(groups.bases[1:].tolist()):
        mine = keys[(keys >= groups.bases[table]) & (keys < end)]
        there = groups.everywhere(of[table], groups.key(table, mine - groups.bases[table]))
        assert np.array_equal(there, mine)


@pytest.mark.parametrize("dram", ["32MiB", "64MiB", "1GiB"])
@pytest.mark.parametrize("rows", [[10, 10**6, 10**5], [10**9, 2000, 10**4], [10**12, 10**12, 10**12]])
def test_a_budget_holds_in_total(tmp_path: Path, each_width: None, dram: str, rows: list[int]) -> None:
    configs = configs_of([4, 16, 48], rows)
    with EmbeddingBagCollection(configs, optimizer=RowWiseAdagrad(), dram=dram, path=tmp_path) as tables:
        draw = np.random.default_rng(0)
        for _ in range(20):
            ids = np.stack([(count * draw.random(256) ** 2).astype(np.int64) for count in rows], 1)
            tables(torch.from_numpy(ids)).values().sum().backward()
        budget = int(re.sub(r"\D", "", dram)) << (30 if "G" in dram else 20)
        assert tables.memory_bytes <= budget
        tables.checkpoint()
        assert tables.memory_bytes <= budget


def test_shares_add_up_and_no_table_is_starved() -> None:
    for dram in (2**25, 2**26, 2**30, 2**34):
        for rows in ([10**9, 10**5], [10**5, 10**9], [10**5, 10**5], [100, 10**6]):
            groups = RowGroups([1, 0], [8, 128], rows)
            shares = TierArguments(groups, dram, "belady", "none", None, None).shares
            assert sum(shares) == dram
            assert min(shares) > 2**20
    few = TierArguments(RowGroups([0, 1], [128, 8], [100, 10**9]), 2**30, "belady", "none", None, None)
    assert few.shares[0] < 2**24  # all of its rows, and the buffers


def test_a_budget_that_is_said_to_be_enough_is(tmp_path: Path, each_width: None) -> None:
    configs = configs_of([4, 128], [10**6, 10**6])
    ids = torch.stack([torch.zeros(9000, dtype=torch.int64), torch.arange(9000)], 1)
    with pytest.raises(BudgetError, match="dram=") as refused:
        EmbeddingBagCollection(configs, dram="3MiB", path=tmp_path / "a", step_rows=9000)
    dram = int(re.findall(r"dram=(\d+)", str(refused.value))[-1])
    for name in "bcdefgh":
        with EmbeddingBagCollection(configs, dram=dram, path=tmp_path / name, step_rows=9000) as tables:
            try:
                tables(ids).values().sum().backward()
            except BudgetError as error:
                dram = int(re.findall(r"dram=(\d+)", str(error))[-1])
            else:
                break
    else:
        pytest.fail("no budget was enough")


def test_tables_made_before_go_on_with_one_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = configs_of([4, 40], [300, 300])
    before = EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path)
    memory = InMemory(before, configs)
    theirs = torch.optim.SGD(memory.parameters(), lr=0.01)

    def train(tables: Any, seed: int) -> None:
        for batch in batches_of(configs, np.random.default_rng(seed), 5):
            tables(batch).values().sin().sum().backward()
            theirs.zero_grad()
            memory(batch).sin().sum().backward()
            theirs.step()

    with before:
        assert len(before.tables.groups) == 1
        train(before, 0)
        before.checkpoint()
    monkeypatch.setattr(row_groups, "TIER_BYTES", 0)
    with EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path, resume=True) as tables:
        assert len(tables.tables.groups) == 1
        train(tables, 1)
        tables.checkpoint()
        assert_equal(tables, memory)
        with TableReader(tmp_path, dram="24MiB") as reader:
            for number, bag in enumerate(memory.bags):
                assert torch.equal(reader.rows(np.arange(300), number), bag.weight)


def test_a_policy_of_the_callers_is_one_for_all_rows(tmp_path: Path, each_width: None) -> None:
    configs = configs_of([4, 40], [300, 300])
    with EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path / "a", policy=Belady(40)) as tables:
        assert len(tables.tables.groups) == 1
        assert tables.stats()["capacity"] == 40
        tables.checkpoint()
    with EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path / "b") as tables:
        tables.checkpoint()
    with pytest.raises(ValueError, match=r"policy: the rows of .* have 2 widths"):
        EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path / "b", policy=Belady(40), resume=True)


def test_a_reader_and_exports_have_the_rows_of_all_widths(tmp_path: Path, each_width: None) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    rows, configs = 400, configs_of([4, 40, 9], [400, 400, 400])
    options: dict[str, Any] = {"optimizer": RULES["adagrad"][0], "dram": "24MiB", "path": tmp_path / "tables"}
    with EmbeddingBagCollection(configs, **options) as tables:
        tables.checkpoint()
        reader = TableReader(tmp_path / "tables", dram="16MiB")
        for seed in range(3):
            for batch in batches_of(configs, np.random.default_rng(seed), 6):
                tables(batch).values().sin().sum().backward()
            tables.checkpoint({"seed": seed})
            assert reader.refresh()
            assert reader.extra == {"seed": seed}
            for number in range(3):
                every = np.arange(rows)
                assert torch.equal(reader.rows(every, number), tables.weights(every, number))
            served = reader.embedding_bag_collection(configs)
            tables.eval()
            assert torch.equal(served(batch).values(), tables(batch).values())
            tables.train()
            assert reader.memory_bytes <= 16 << 20
            # Not in a checkpoint yet: the reader stays at one moment of all widths.
            tables(batch).values().sum().backward()
        assert reader.stats()["trained_rows"] == sum(int(reader.trained(every, number).sum()) for number in range(3))
        reader.close()
        export_safetensors(tables, tmp_path / "all.safetensors")
        found = safetensors.load_file(tmp_path / "all.safetensors")
        for number, config in enumerate(configs):
            weights = tables.weights(np.arange(rows), number)
            assert torch.equal(found[config.name], weights)
            export_quantised(tables, tmp_path / "one.safetensors", number)
            with QuantisedTable(tmp_path / "one.safetensors", dram="8MiB") as table:
                assert (table.rows(np.arange(rows)) - weights).abs().max() < 0.02
        state = {
            f"embedding_bags.{config.name}.weight": torch.full((rows, config.embedding_dim), 2.0) for config in configs
        }
        tables.load_state_dict(state)
        assert all((tables.weights(np.arange(rows), number) == 2).all() for number in range(3))
        assert all((tables.optimizer_state(np.arange(rows), number) == 0).all() for number in range(3))


def test_tables_for_any_ids_in_groups(tmp_path: Path, each_width: None) -> None:
    def make(path: Path, resume: bool = False) -> EmbeddingBagCollection:
        configs = [
            EmbeddingBagConfig(name="a", num_embeddings=50, embedding_dim=3, id_space=Hash64(expire_after=4)),
            EmbeddingBagConfig(name="b", num_embeddings=60, embedding_dim=30),
            EmbeddingBagConfig(name="c", num_embeddings=70, embedding_dim=30, id_space="hash64"),
        ]
        return EmbeddingBagCollection(
            configs, optimizer=RULES["adam"][0], dram="32MiB", path=path, resume=resume, policy="belady"
        )

    draw = np.random.default_rng(0)
    batches = [torch.from_numpy(np.stack([draw.integers(0, most, 6) for most in (10**9, 60, 10**9)], 1))
               for _ in range(20)]  # fmt: skip

    def state(tables: EmbeddingBagCollection) -> list[Tensor]:
        ids = [torch.cat([*tables.ids(0)]), torch.arange(60), torch.cat([*tables.ids(2)])]
        return [*ids, *(tables.weights(some, number) for number, some in enumerate(ids)),
                *(tables.optimizer_state(some, number) for number, some in enumerate(ids))]  # fmt: skip

    with make(tmp_path / "plain") as tables:
        for batch in batches:
            tables(batch).values().sin().sum().backward()
        wanted = state(tables)
    with make(tmp_path / "ahead") as tables:
        for batch in lookahead(batches[:9], tables, ids=lambda batch: batch):
            tables(batch).values().sin().sum().backward()
        tables.checkpoint()
    with make(tmp_path / "ahead", resume=True) as tables:
        for batch in batches[9:]:
            tables(batch).values().sin().sum().backward()
        assert all(map(torch.equal, state(tables), wanted))


def test_one_optimizer_by_table(tmp_path: Path, each_width: None) -> None:
    configs = configs_of([6, 6, 6], [80, 80, 80])
    rules = {"t0": RULES["sgd"], "t1": RULES["adam"], "t2": RULES["adagrad"]}
    with EmbeddingBagCollection(
        configs, optimizer={name: rule for name, (rule, _) in rules.items()}, dram="24MiB", path=tmp_path
    ) as tables:
        assert tables.tables.groups.widths == [18, 12, 6]  # of one width, with state of several
        memory = InMemory(tables, configs)
        theirs = [make([bag.weight]) for (_, make), bag in zip(rules.values(), memory.bags, strict=True)]
        for batch in batches_of(configs, np.random.default_rng(1), 15):
            tables(batch).values().sin().sum().backward()
            memory(batch).sin().sum().backward()
            for optimizer in theirs:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(tables, memory)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_frozen_collection_and_a_sum_of_two_look_ups(tmp_path: Path, each_width: None, update: Any) -> None:
    configs = configs_of([2, 33], [90, 90])
    with EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path, update=update) as tables:
        before = [tables.weights(np.arange(90), number) for number in range(2)]
        tables.requires_grad_(False)
        first, second = batches_of(configs, np.random.default_rng(0), 2)
        tables(first).values().sum()
        tables.requires_grad_(True)
        (tables(first).values().sum() * 0 + tables(second).values().sum() * 0).backward()
        tables.optimizer.step()
        after = [tables.weights(np.arange(90), number) for number in range(2)]
        assert all(map(torch.equal, before, after))


@pytest.mark.usefixtures("one_rank")
def test_ranks_store_by_width_and_have_the_bits_of_one_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = configs_of([2, 33, 2], [90, 50, 7])
    batches = batches_of(configs, np.random.default_rng(3), 12)
    options: dict[str, Any] = {"optimizer": RULES["adam"][0], "dram": "24MiB"}

    def rows_of(tables: Any) -> list[Tensor]:
        every = [np.arange(config.num_embeddings) for config in configs]
        reads = tables.weights, tables.optimizer_state
        return [read(rows, table) for table, rows in enumerate(every) for read in reads]

    found = []
    for tier_bytes, groups in ((2**30, 1), (0, 2)):
        monkeypatch.setattr(row_groups, "TIER_BYTES", tier_bytes)
        path = tmp_path / str(groups)
        with ShardedEmbeddingBagCollection(configs, path=path, **options) as tables:
            assert len(tables.tables.groups) == groups
            for batch in lookahead(batches, tables, ids=lambda batch: batch):
                tables(batch).values().sin().sum().backward()
            found.append(rows_of(tables))
            tables.checkpoint()
        with ShardedEmbeddingBagCollection(configs, path=path, resume=True, **options) as tables:
            found.append(rows_of(tables))
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def test_groups_that_a_catalog_cannot_have_are_refused(tmp_path: Path, each_width: None) -> None:
    configs = configs_of([4, 40], [30, 30])
    with EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path) as tables:
        tables.checkpoint()
    with Store.open(tmp_path, KIND) as store:
        record = store.get("recsys/tables")
    assert record is not None
    assert b'"groups": [1, 0]' in record
    for groups in (b"[1, 1]", b"[0]", b"[0, -1]", b'"ab"', b"[0, 2]", b"{}"):
        with Store.open(tmp_path, KIND, writable=True) as store, store.begin() as tx:
            tx.put("recsys/tables", record.replace(b'"groups": [1, 0]', b'"groups": ' + groups))
            tx.commit()
        for opened in (
            lambda: EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path, resume=True),
            lambda: TableReader(tmp_path, dram="24MiB"),
        ):
            with pytest.raises(CorruptionError, match="recsys/tables"):
                opened()


def test_code_that_knows_no_groups_refuses_them(tmp_path: Path, each_width: None) -> None:
    """It compares the tables' descriptions, as this code does, and overlooks `groups`."""
    configs = configs_of([4, 40], [30, 30])
    with EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path) as tables:
        tables.checkpoint()
    with Store.open(tmp_path, KIND, writable=True) as store, store.begin() as tx:
        record = store.get("recsys/tables")
        assert record is not None
        tx.put("recsys/tables", record.replace(b'"groups": [1, 0]', b'"seed": 0'))
        tx.commit()
    with pytest.raises(FormatError, match="'grouped': True"):
        EmbeddingBagCollection(configs, dram="24MiB", path=tmp_path, resume=True)


def test_a_kill_leaves_one_checkpoint_of_all_widths(tmp_path: Path, training: Any) -> None:
    code, output = training(SCRIPT, tmp_path / "whole", 60).end()
    assert code == 0
    wanted = output.splitlines()[-1]
    assert wanted.startswith("end")
    for count in (1, 2, 2, 3, 3):
        started = training(SCRIPT, tmp_path / "killed", 60)
        with started.stdout:
            for _ in range(count):
                assert started.stdout.readline().startswith("saved")
            time.sleep(0.007 * count)  # into the next checkpoint
            started.process.kill()
        assert started.wait() == -signal.SIGKILL
    code, output = training(SCRIPT, tmp_path / "killed", 60).end()
    assert code == 0
    assert output.splitlines()[-1] == wanted
