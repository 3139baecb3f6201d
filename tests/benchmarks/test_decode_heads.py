"""The workload of language models' output layers: the made layer, its states, and the comparison."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from memhier.ann import open_head  # noqa: E402
from memhier.benchmarks.workloads.decode.language import heads  # noqa: E402
from memhier.benchmarks.workloads.decode.language.made import SPECTRA, made_contexts, write_made_head  # noqa: E402

WORDS, DIMENSION = 900, 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("made") / "model.safetensors"
    write_made_head(path, WORDS, DIMENSION, torch.bfloat16, "flat")
    return path


def test_a_made_layer_has_the_spectrum_that_it_states(made: Path, tmp_path: Path) -> None:
    weight = open_head(made).weight.detach().double()
    assert weight.shape == (WORDS, DIMENSION)
    norms = weight.norm(dim=1)
    assert float(norms.log().std()) == pytest.approx(0.1, rel=0.2)
    values = torch.linalg.svdvals(weight / norms[:, None]).numpy()
    slope = np.polyfit(np.log(np.arange(1, DIMENSION + 1)), np.log(values), 1)[0]
    assert slope == pytest.approx(-0.25, abs=0.1)
    write_made_head(tmp_path / "again.safetensors", WORDS, DIMENSION, torch.bfloat16, "flat")
    assert (tmp_path / "again.safetensors").read_bytes() == made.read_bytes()


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_likeliest_word_of_made_states_is_as_likely_as_stated(made: Path, spectrum: str) -> None:
    weight = open_head(made).weight.detach()
    states = made_contexts(weight, 400, spectrum)
    likeliest = (torch.from_numpy(states) @ weight.float().T).softmax(1).max(1).values
    assert float(likeliest.median()) == pytest.approx(0.5, abs=0.15)
    assert float(likeliest.quantile(0.05)) < 0.3 < 0.7 < float(likeliest.quantile(0.95))


def test_matched_numbers_have_the_spectrum_of_the_trained_layer(tmp_path: Path) -> None:
    write_made_head(tmp_path / "model.safetensors", 64_000, 64, torch.float16, "matched")
    weight = open_head(tmp_path).weight.detach().double()
    values = torch.linalg.svdvals(weight / weight.norm(dim=1, keepdim=True))
    # Direction 2 of 64 is direction 16 of 512, and so on.
    for number, share in ((8, 0.2947), (32, 0.275), (64, 0.2478)):
        assert float(values[number - 1] / values[1]) == pytest.approx(share / 0.3241, rel=0.2)
    states = made_contexts(weight.half(), 2_000, "matched").astype(np.float64)
    variances = np.linalg.eigvalsh(np.cov(states.T))[::-1]
    assert variances[15] / variances[1] == pytest.approx(0.00108 / 0.0972, rel=0.5)


def test_truth_is_that_of_double_precision(made: Path) -> None:
    weight = open_head(made).weight.detach()
    states = made_contexts(weight, 20, "flat")
    tenth, first = heads.truth_of(weight, states)
    logits = np.sort(states.astype(np.float64) @ weight.double().numpy().T, 1)
    np.testing.assert_allclose(np.stack([tenth, first]), logits[:, [-10, -1]].T, rtol=1e-12)


def test_the_workload_compares_ways(made: Path, tmp_path: Path) -> None:
    contexts = tmp_path / "states.npy"
    np.save(contexts, made_contexts(open_head(made).weight.detach(), 700, "matched"))
    words = ["--weights", str(made), "--contexts", str(contexts), "--rounds", "2", "--precision", "0.99",
             "--no-peers", "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")]  # fmt: skip
    told = CliRunner().invoke(heads.main, words, catch_exceptions=False)
    assert told.exit_code == 0, told.output
    found = json.loads((tmp_path / "out.json").read_text())
    shares = {row["way"]: row for row in found["agreement"]}
    assert shares["full, fp32"]["top1"] == 1
    assert shares["decoder, preview"]["precision"] > 0.97
    assert {row["call"] for row in found["times"]} == {"1", "4", "16", "64", "[1, 8] positions"}
    assert found["build"]["layer_MiB"] == WORDS * DIMENSION * 2 / 2**20
    assert found["build"]["share"] > 0
