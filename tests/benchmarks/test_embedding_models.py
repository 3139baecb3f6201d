"""The models, logs and figures of the workloads of embedding tables."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from memhier.benchmarks.workloads.embedding.common import Sample, TableKind, power_law
from memhier.benchmarks.workloads.embedding.models.filtering import recall
from memhier.benchmarks.workloads.embedding.models.logs import LogOptions, fitted_exponent, histories, open_log
from memhier.benchmarks.workloads.embedding.models.training import MODELS, main, measure


def options(name: str, path: Path | None = None, **others: Any) -> LogOptions:
    given = {"scale": 0.001, "rows": 50_000, "batch": 4, "count": 3, "length": 3}
    return LogOptions(name, path, **(given | others))


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_losses_of_torch_and_learns(model: str, tmp_path: Path) -> None:
    kind = MODELS[model][0]
    if kind == "clicks":
        rng = np.random.default_rng(0)
        ids = torch.from_numpy(rng.integers(0, 9, (24, 16, 5)))
        batches = [Sample(some, torch.ones(16, 13), (some[:, 0] > 4).float()) for some in ids]
        log = open_log(options("made-pairs"), False)
        log = type(log)("clicks", [9, 9, 9, 9, 200], batches)
    else:
        log = open_log(options("made-pairs", rows=400_000, count=24, batch=16), kind == "histories")
    rows = measure(tmp_path, model, log, [0.6, 1.0], TableKind(8, rate=0.1, sequences=kind == "histories",
                                                                 same_start=True), 3, 2)  # fmt: skip
    assert {row["way"] for row in rows} == {"torch", "60% in DRAM", "100% in DRAM"}
    assert not any(row["other"] for row in rows)
    assert all(np.isfinite(row["loss"]) for row in rows)


def test_histories_of_users() -> None:
    pairs = [torch.tensor([[0, 5], [0, 6]]), torch.tensor([[0, 7], [0, 8], [0, 9], [1, 3], [2, 1], [2, 2]])]
    (found,) = histories(pairs, 20, 3, 8)
    items, following, others = found.ids.view(-1, 3, 3).unbind(1)
    assert items.tolist() == [[6, 7, 8], [9, 0, 0], [2, 0, 0]]
    assert following.tolist() == [[7, 8, 9], [10, 0, 0], [3, 0, 0]]
    assert torch.equal(others > 0, items > 0)
    assert others.max() < 20
    assert [len(part.ids) for part in histories(pairs, 20, 3, 2)] == [2, 1]
    assert [*histories([], 20, 3, 2)] == []


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.4, 2.0])
@pytest.mark.parametrize("rows", [1000, 1_000_000])
def test_an_exponent_is_found_again(exponent: float, rows: int) -> None:
    ids = power_law(np.random.default_rng(0).random(20_000), rows, exponent)
    assert fitted_exponent(len(np.unique(ids)), len(ids), rows) == pytest.approx(exponent, abs=0.08)


def test_recall_leaves_known_items_out() -> None:
    users, items = torch.eye(3), torch.zeros(30, 3)
    items[:, 0] = torch.arange(30.0)
    items[:, 1] = -torch.arange(30.0)
    train = np.array([[0, 29], [0, 28], [1, 4]])
    test = np.array([[0, 27], [0, 8], [0, 7], [1, 0], [1, 20], [1, 21]])
    # Of user 0 the best are 27 to 8, of user 1 they are 0 to 20 without 4; user 2 has nothing held out.
    assert recall(users, items, train, test) == pytest.approx((2 / 3 + 2 / 3) / 2)


def criteo_line(at: int) -> str:
    return "\t".join([str(at % 2), *([""] * 13 if at % 3 else ["7"] * 13), *([""] * 26 if at % 4 else ["ab"] * 26)])


PUBLISHED = {
    "criteo": [criteo_line(at) for at in range(13)],
    "avazu": ["id,click,hour," + ",".join(f"c{at}" for at in range(21))]
    + [f"{at},{at % 2},14102100," + ",".join([""] * 21) for at in range(13)],
    "movielens": ["userId,movieId,rating,timestamp"] + [f"{at // 5 + 1},{at + 1},3.5,9" for at in range(40)],
    "amazon": [f"A{at // 5},B{at},3.0,9" for at in range(40)],
    "lightgcn": ["0 3 4 5 6 7", "1 3 4", "2", "3 1 2 3 4 5 6 7 8"],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_by_path(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in PUBLISHED[name]).encode()))
    pairs = name not in ("criteo", "avazu")
    for sequences in (False, True) if pairs else (False,):
        log = open_log(options(name, path, batch=2, count=2), sequences)
        width = {"pairs": 2, "histories": 9}.get(log.kind, len(log.sizes))
        for batch in log.batches:
            assert batch.ids.shape == (2, width)
            assert batch.ids.min() >= 0
            assert (batch.ids < (torch.tensor(log.sizes) if log.kind != "histories" else log.sizes[0])).all()
            assert batch.dense.shape == (2, 0 if pairs else 13)
    with pytest.raises(ValueError, match=r"batches of 4, expected 99"):
        open_log(options(name, path, count=99), False)
    with pytest.raises(ValueError, match="path: expected the file"):
        open_log(options(name), False)
    with pytest.raises(ValueError, match="expected one of criteo-sample"):
        open_log(options("other"), False)


def test_the_command_tells_what_fits_no_log(tmp_path: Path) -> None:
    path = tmp_path / "pairs"
    path.write_text("\n".join(PUBLISHED["lightgcn"]))
    given = [
        "--log",
        "lightgcn",
        "--path",
        str(path),
        "--model",
        "dlrm",
        "--batch",
        "2",
        "--steps",
        "1",
        "--rounds",
        "1",
    ]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 2
    assert "fits the log 'lightgcn'" in result.output
