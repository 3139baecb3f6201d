"""The workload of words a second: its text, its model, and the comparison with a decoder."""

import json
import lzma
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memhier.benchmarks.workloads.decode.language import generation  # noqa: E402
from memhier.benchmarks.workloads.decode.language.text import (  # noqa: E402
    brown_and_wikitext,
    given_text,
    made_text,
)
from memhier.benchmarks.workloads.decode.language.writer import Shape, train_writer, with_idle_layers  # noqa: E402

SMALL = Shape(words=200, width=16, layers=1, heads=2, steps=3)


def test_a_training_is_kept_and_gives_the_same_model(tmp_path: Path) -> None:
    text = made_text(200, 40)
    first, again = train_writer(text, SMALL, tmp_path / "one"), train_writer(text, SMALL, tmp_path / "two")
    kept = train_writer(text, SMALL, tmp_path / "one")
    for other in (again, kept):
        assert other.loss == first.loss
        for one, two in zip(first.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one, two)
    assert kept.seconds == first.seconds
    assert len(list((tmp_path / "one").iterdir())) == 1


def test_a_training_lowers_the_loss(tmp_path: Path) -> None:
    text = made_text(200, 40)
    longer = Shape(words=200, width=16, layers=1, heads=2, steps=120)
    assert train_writer(text, longer, tmp_path).loss < train_writer(text, SMALL, tmp_path).loss - 0.3


def test_idle_layers_leave_texts_as_they_are(tmp_path: Path) -> None:
    writer = train_writer(made_text(200, 40), SMALL, tmp_path)
    more = with_idle_layers(writer, 2)
    assert more.config.n_layer == 3
    words = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(more(words).logits, writer.model(words).logits)


def test_text_comes_from_brown_and_wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brown").mkdir()
    with zipfile.ZipFile(tmp_path / "brown" / "brown.zip", "w") as archive:
        archive.writestr("brown/README", "not a text")
        archive.writestr("brown/ca01", "\n\tThe/at and\\/or/cc jury/nn ./.\n\n\tIt/pps ran/vbd ./.\n")
    (tmp_path / "wikitext-2").mkdir()
    for part in ("valid", "test"):
        lines = f" = Heading = \n\n A {part} <unk> line . \n {'word ' * 60}\n"
        (tmp_path / "wikitext-2" / f"{part}.txt.xz").write_bytes(lzma.compress(lines.encode()))
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    text = brown_and_wikitext()
    assert sorted(line[:24] for line in text.learned) == sorted(
        ["The and\\/or jury .", "It ran .", "A valid <unk> line .", ("word " * 60)[:24]]
    )
    assert [line[:4] for line in text.held_out] == ["word"]


def test_one_line_in_twenty_of_a_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(f"line {number}" for number in range(40)))
    text = given_text(file)
    assert text.held_out == ["line 0", "line 20"]
    assert len(text.learned) == 38


def test_both_models_write_the_same_texts(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    words = ["--made", "1000", "--width", "16", "--layers", "1", "--steps", "3", "--idle-layers", "1"]
    words += ["--prompts", "8", "--length", "4", "--rounds", "1", "--work", str(tmp_path), "--json", str(out)]
    told = CliRunner().invoke(generation.main, words, catch_exceptions=False)
    assert told.exit_code == 0, told.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["call"] for row in rows[::2]] == ["greedy", "4 beams", "top-p 0.9", "greedy, 8 texts"]
    for row in rows:
        assert row["body"] == "1 + 1 layers"
        assert row["same"] == 1 or row["call"] == "top-p 0.9"
        assert 0 < row["body_ms"] < row["ms"]


def test_a_text_too_short_for_its_prompts_is_told(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join("a b c d e f" for _ in range(40)))
    words = ["--text", str(file), "--width", "16", "--layers", "1", "--steps", "1", "--work", str(tmp_path)]
    told = CliRunner().invoke(generation.main, words)
    assert told.exit_code == 1
    assert "too few words are held out for 16 prompts" in told.output
