"""Readers of published data sets: small files of each kind, whole and damaged."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.errors import FormatError
from memhier.recsys.embedding.reading.readers import (
    read_amazon,
    read_avazu,
    read_criteo,
    read_criteo_npy,
    read_criteo_parquet,
    read_lightgcn,
    read_movielens,
)

ROWS = [100] * 26


def line(label: int, numbers: list[str], ids: list[str]) -> str:
    return "\t".join([str(label), *numbers, *ids]) + "\n"


LINES = [
    line(1, [str(at) for at in range(13)], [f"{at:08x}" for at in range(26)]),
    line(0, [""] * 13, [""] * 26),
    line(0, ["-3"] * 13, ["68fd1e64"] * 26),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 97])
def test_criteo_as_it_is_published(tmp_path: Path, packed: bool, batch: int) -> None:
    path = tmp_path / ("day.gz" if packed else "day.tsv")
    text = "".join(LINES).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    batches = [*read_criteo(path, ROWS, batch)]
    assert [len(part.labels) for part in batches] == [min(batch, 3 - at) for at in range(0, 3, batch)]
    labels, dense, ids = (torch.cat([getattr(part, name) for part in batches]) for name in ("labels", "dense", "ids"))
    assert labels.tolist() == [1, 0, 0]
    assert torch.allclose(dense[0], torch.log(torch.arange(13) + 3.0))
    assert not dense[1].any()
    assert not ids[1].any()
    assert ids[2].tolist() == [1 + zlib.crc32(b"68fd1e64") % 99] * 26
    assert ids.min() == 0
    assert ids[[0, 2]].min() >= 1
    assert ids.max() < 100


def test_criteo_in_other_shapes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = rng.integers(0, 2, (5, 1)), rng.random((5, 13), np.float32), rng.integers(0, 1000, (5, 26))
    for name, part in zip("abc", parts, strict=True):
        np.save(tmp_path / f"{name}.npy", part.astype(np.float32 if name == "b" else np.int32))
    paths: list[Any] = [tmp_path / f"{name}.npy" for name in "abc"]
    batches = [*read_criteo_npy(*paths, ROWS, 3)]
    assert torch.equal(torch.cat([part.ids for part in batches]), torch.from_numpy(parts[2] % 100))
    assert torch.equal(torch.cat([part.dense for part in batches]), torch.from_numpy(parts[1]))
    with pytest.raises(FormatError, match="expected"):
        next(read_criteo_npy(paths[0], paths[2], paths[1], ROWS))
    np.save(tmp_path / "d.npy", np.zeros((5, 2), np.int32))
    with pytest.raises(FormatError, match="expected"):
        next(read_criteo_npy(tmp_path / "d.npy", *paths[1:], ROWS))
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"label": [1, 0]} | {f"int_{at}": [2, None] for at in range(13)}
    columns |= {f"cat_{at}": ["68fd1e64", None] for at in range(26)}
    parquet.write_table(arrow.table(columns), tmp_path / "day.parquet")
    (found,) = read_criteo_parquet(tmp_path / "day.parquet", ROWS)
    assert found.ids[:, 0].tolist() == [1 + zlib.crc32(b"68fd1e64") % 99, 0]
    assert torch.allclose(found.dense[0], torch.full((13,), 5.0).log())
    parquet.write_table(arrow.table({"label": [1]}), tmp_path / "other.parquet")
    with pytest.raises(FormatError, match="cat_0"):
        next(read_criteo_parquet(tmp_path / "other.parquet", ROWS))


def test_avazu(tmp_path: Path) -> None:
    header = "id,click,hour,C1,banner_pos," + ",".join(f"x{at}" for at in range(19)) + "\n"
    cells = ",".join(f"v{at}" for at in range(21))
    (tmp_path / "train").write_text(header + f"7,1,14102123,{cells}\n8,0,14102100,{cells}\n")
    (found,) = read_avazu(tmp_path / "train", [50] * 22)
    assert found.labels.tolist() == [1, 0]
    assert found.dense.shape == (2, 0)
    assert found.ids[:, 0].tolist() == [1 + zlib.crc32(hour) % 49 for hour in (b"23", b"00")]
    assert torch.equal(found.ids[0, 1:], found.ids[1, 1:])
    (tmp_path / "bad").write_text("a,b\n")
    with pytest.raises(FormatError, match="header"):
        next(read_avazu(tmp_path / "bad", [50] * 22))


def test_movielens(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,31,2.5,9\n2,7,4,9\n")
    (tmp_path / "ratings.dat").write_text("1::31::2.5::9\n2::7::4::9\n")
    for name in ("ratings.csv", "ratings.dat"):
        ((pairs, ratings),) = read_movielens(tmp_path / name)
        assert pairs.tolist() == [[1, 31], [2, 7]]
        assert ratings.tolist() == [2.5, 4]


def test_lightgcn(tmp_path: Path, data: Callable[[str], Path]) -> None:
    (tmp_path / "train.txt").write_text("0 5 6 7\n1\n2 9\n")
    for batch, sizes in ((2, [2, 2]), (3, [3, 1]), (9, [4])):
        found = [*read_lightgcn(tmp_path / "train.txt", batch)]
        assert [len(part) for part in found] == sizes
        assert torch.cat(found).tolist() == [[0, 5], [0, 6], [0, 7], [2, 9]]
    assert sum(len(part) for part in read_lightgcn(data("gowalla") / "test.txt.xz")) == 217_242


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\t2\n", "line 1 has 2 cells, expected 40"),
        (LINES[0] + "x" + LINES[0][1:], "line 2"),
        (LINES[0] + "\n", "line 2"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "day").write_text(text)
    with pytest.raises(FormatError, match=words):
        list(read_criteo(tmp_path / "day", ROWS))


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="26 numbers"):
        next(read_criteo(tmp_path, [1]))
    with pytest.raises(ValueError, match="batch=0"):
        next(read_criteo(tmp_path, ROWS, 0))
    with pytest.raises(FileNotFoundError):
        next(read_movielens(tmp_path / "none"))


AMAZON = {
    "2014.csv": "A1YS9MDZP93857,0006428320,3.0,1394496000\n,0000013714,5.0,1388620800\n",
    "2018.csv": "0006428320,A1YS9MDZP93857,3.0,1394496000\n0000013714,,5.0,1388620800\n",
    "2018.json": '{"overall": 3.0, "vote": "2", "reviewerID": "A1YS9MDZP93857", "asin": "0006428320"}\n'
    '{"asin": "0000013714", "overall": 5, "reviewText": "user_id,rating"}\n',
    "2023.csv": "user_id,parent_asin,rating,timestamp,history\n"
    "A1YS9MDZP93857,0006428320,3.0,1394496000000,\n,0000013714,5.0,1388620800000,B00 B01\n",
    "2023.jsonl": '{"rating": 3, "asin": "B00", "parent_asin": "0006428320", "user_id": "A1YS9MDZP93857"}\n'
    '{"rating": 5.0, "parent_asin": "0000013714", "user_id": null}\n',
}


@pytest.mark.parametrize("name", AMAZON)
@pytest.mark.parametrize("batch", [1, 2, 97])
def test_amazon_in_every_shape(tmp_path: Path, name: str, batch: int) -> None:
    (tmp_path / name).write_text(AMAZON[name])
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(AMAZON[name].encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        found = [*read_amazon(path, [100, 50], batch, item_first=name == "2018.csv")]
        assert sum(len(ratings) for _, ratings in found) == 2
        pairs, ratings = (torch.cat(part) for part in zip(*found, strict=True))
        assert ratings.tolist() == [3, 5]
        items = [1 + zlib.crc32(item) % 49 for item in (b"0006428320", b"0000013714")]
        assert pairs.tolist() == [[1 + zlib.crc32(b"A1YS9MDZP93857") % 99, items[0]], [0, items[1]]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("user_id,parent_asin,stars\n", "line 1"),
        ("user_id,parent_asin,rating,timestamp\nA,B,5,1\nA,B\n", "line 3: 2 cells"),
        ("A,B,five,1\n", "line 1"),
        ('{"asin": "B"}\n', "line 1: no key"),
        ('{"overall": 5}\n{"overall": [5]}\n', "line 2"),
        ('{"overall": 5}\n{"overall"\n', "line 2"),
        ("{'overall': 5}\n", "line 1"),
        ('{"overall": 5}\n[5]\n', "line 2"),
        pytest.param("{" + '"a": [' * 100_000 + "\n", "line 1", id="deep"),
    ],
)
def test_damaged_reviews_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "reviews").write_text(text)
    for batch in (1, 97):
        with pytest.raises(FormatError, match=words):
            list(read_amazon(tmp_path / "reviews", [10, 10], batch))
