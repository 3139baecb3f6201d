"""The workload of translation: its text, its training, its beam search and its output layers."""

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from memhier.benchmarks.workloads.decode import heads, translation  # noqa: E402
from memhier.benchmarks.workloads.decode.translator import sentences, training  # noqa: E402
from memhier.benchmarks.workloads.decode.translator.beams import translate  # noqa: E402
from memhier.benchmarks.workloads.decode.translator.model import Translator  # noqa: E402
from memhier.benchmarks.workloads.decode.translator.sentences import BEGIN, END, PAD, UNKNOWN, Vocabulary  # noqa: E402
from memhier.benchmarks.workloads.decode.translator.ways import Ways  # noqa: E402

TINY = training.Recipe(width=16, epochs=2, batch=8, head=5, drawn=5)


def test_a_vocabulary_holds_the_most_frequent_words() -> None:
    words = Vocabulary(["b a, b.", "c b a-a"], 7)
    assert words.words == [*sentences.SPECIALS, "b", ",", "."]
    assert words.encode("b , z") == [4, 5, UNKNOWN]
    assert len(words) == 7


def test_a_sentence_goes_through_words_and_back() -> None:
    text = "Ein Mann (ein alter), der's Wetter-Lied singt."
    words = Vocabulary([text], 100)
    assert words.decode([*words.encode(text), END, 4]) == text


def test_pairs_come_from_one_file_or_two(tmp_path: Path) -> None:
    expected = [("a b", "x"), ("c", "y z")]
    (tmp_path / "both.tsv").write_text("a b\tx\n\tempty\nc\ty z\tmore\n")
    (tmp_path / "one.txt").write_text("a b\n \nc\n")
    (tmp_path / "two.txt.gz").write_bytes(gzip.compress(b"x\nempty\ny z\n"))
    (tmp_path / "longer.txt").write_text("a\nb\nc\nd\n")
    assert sentences.read_pairs(tmp_path / "both.tsv") == expected
    assert sentences.read_pairs(tmp_path / "one.txt", tmp_path / "two.txt.gz") == expected
    with pytest.raises(ValueError, match="line 1: expected a sentence, a tab"):
        sentences.read_pairs(tmp_path / "one.txt")
    with pytest.raises(ValueError, match="as many in both"):
        sentences.read_pairs(tmp_path / "one.txt", tmp_path / "longer.txt")


def test_held_out_pairs_are_not_learned_from(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"a{number}\tb{number}\n" for number in range(57)))
    corpus = sentences.load(tmp_path / "pairs.tsv", held_out=10)
    assert len(set(corpus.test)) == 10
    assert len(corpus.train) == 47
    assert not set(corpus.test) & set(corpus.train)
    with pytest.raises(ValueError, match="57 pairs: expected more than the 57"):
        sentences.load(tmp_path / "pairs.tsv", held_out=57)


def test_batches_hold_every_pair_once() -> None:
    random = np.random.default_rng(0)
    pairs = [
        (random.integers(4, 99, random.integers(1, 5)).tolist(), random.integers(4, 99, random.integers(1, 9)).tolist())
        for _ in range(83)
    ]
    seen = []
    for batch in training.batches_of(pairs, 7, np.random.default_rng(1)):
        assert len(batch.source) <= 7
        for source, before, words in zip(batch.source, batch.before, batch.words, strict=True):
            target = words[words != PAD].tolist()
            assert target.pop() == END
            assert before[before != PAD].tolist() == [BEGIN, *target]
            seen.append((source.tolist(), target))
    assert sorted(seen) == sorted(pairs)


@torch.no_grad()
def test_the_loss_of_drawn_words_estimates_z_without_bias() -> None:
    torch.manual_seed(0)
    layer, state, word = torch.nn.Linear(8, 200), 2 * torch.randn(1, 8), torch.tensor([150])
    exact = torch.nn.functional.cross_entropy(layer(state), word).exp()
    drawn = torch.stack([training.word_loss(layer, state, word, TINY).exp() for _ in range(3000)])
    assert abs(drawn.mean() - exact) < 4 * drawn.std() / math.sqrt(len(drawn))
    assert drawn.std() > 0
    every = training.Recipe(drawn=0)
    assert training.word_loss(layer, state, word, every).exp() == pytest.approx(float(exact), rel=1e-5)


def test_a_training_that_was_cut_short_gives_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = sentences.generated(90, 5, 20)
    whole = training.train(corpus, TINY, tmp_path / "whole")
    ways, epochs = training.batches_of, iter(range(9))

    def cut(*arguments: Any) -> Any:
        if next(epochs) == 1:
            raise KeyboardInterrupt
        return ways(*arguments)

    monkeypatch.setattr(training, "batches_of", cut)
    with pytest.raises(KeyboardInterrupt):
        training.train(corpus, TINY, tmp_path / "cut")
    resumed = training.train(corpus, TINY, tmp_path / "cut")
    again = training.train(corpus, TINY, tmp_path / "cut")
    assert next(epochs) == 3  # cut at the second epoch, which ran once more; none for the last
    for other in (resumed, again):
        assert other.losses == whole.losses
        for name, value in whole.model.state_dict().items():
            assert torch.equal(other.model.state_dict()[name], value), name
    assert whole.losses[1] < whole.losses[0]


def plain_search(model: Translator, source: list[int], beam: int, longest: int) -> list[int]:
    """Beam search over all words, one beginning after the other, from its first word each time."""
    read = model.read(torch.tensor([source]))
    beginnings: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(longest):
        following = []
        for score, words in beginnings:
            if words and words[-1] == END:
                following.append((score, words))
                continue
            hidden, _ = model(read, torch.tensor([[BEGIN, *words]]))
            log_probs = model.output(hidden[0, -1]).log_softmax(0)
            following += [(score + float(value), [*words, word]) for word, value in enumerate(log_probs)]
        beginnings = sorted(following, key=lambda one: -one[0])[:beam]
        if all(words[-1] == END for _, words in beginnings):
            break
    words = max(beginnings, key=lambda one: one[0] / sum(word != PAD for word in one[1]))[1]
    return words[: words.index(END)] if END in words else words


@pytest.mark.parametrize("beam", [1, 3, 5])
def test_beams_are_those_of_a_plain_search(beam: int) -> None:
    torch.manual_seed(3)
    model = Translator(12, 9, 16, 0.0).eval()
    with torch.no_grad():
        model.target.weight *= 12  # so that words differ
        model.output.bias[END] = -3
    random = np.random.default_rng(0)
    asked = [random.integers(4, 12, length).tolist() for length in (3, 5, 3, 1, 3)]
    full = next(heads.full_layers(model.output, 5))
    with torch.no_grad():
        found = translate(model, asked, full.choose, beam, 2)
        assert found.words == [plain_search(model, source, beam, 10 + 2 * len(source)) for source in asked]
        assert translate(model, asked, full.choose, beam, 1).words == found.words
    assert len({tuple(words) for words in found.words}) > 1
    assert found.states >= found.steps
    assert found.step_s >= found.layer_s > 0


@torch.no_grad()
@pytest.mark.parametrize(("beam", "width"), [(1, 2.0), (3, 0.01), (3, 0.3), (5, 0.1), (5, 4.0)])
def test_beams_by_bounds_are_those_of_exact_scores(beam: int, width: float) -> None:
    torch.manual_seed(4)
    model = Translator(12, 30, 16, 0.0).eval()
    model.target.weight *= 12
    model.output.weight *= 4
    asked = [np.random.default_rng(at).integers(4, 12, 1 + at % 4).tolist() for at in range(40)]
    random = torch.Generator().manual_seed(0)
    seen = []

    def exact(states: Any) -> Any:
        seen.append(len(states))
        return model.output(states).double().logsumexp(1)

    def bounds(states: Any) -> Any:
        logits = model.output(states)
        z = logits.double().logsumexp(1)
        below, above = width * torch.rand(2, len(states), dtype=torch.float64, generator=random)
        return *torch.topk(logits, 6), z - below, z + above

    def whole(states: Any) -> Any:
        logits = model.output(states)
        values, words = torch.topk(logits, 6)
        return values - logits.logsumexp(1, keepdim=True), words

    right = translate(model, asked, whole, beam, 4)
    found = translate(model, asked, Ways(bounds, exact), beam, 4)
    assert found.words == right.words
    assert found.settled == sum(seen) <= found.states
    assert (found.settled > 0) == (beam > 1 and width > 0.01)
    assert found.settled < found.states / 2 or width > 0.1


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(0)
    made = torch.nn.Linear(24, 400)
    made.weight.data *= 4
    return made


@torch.no_grad()
def test_layers_return_log_probabilities(layer: Any, tmp_path: Path) -> None:
    contexts, states = torch.randn(300, 24), torch.randn(20, 24)
    exact = layer(states).log_softmax(1)
    values, words = torch.topk(exact, 6)
    full, half = heads.full_layers(layer, 6)
    _, (certified, estimated, alone) = heads.top_k_softmax(layer, 6, contexts)
    whole = heads.svd_softmax(layer, 6, 24, 400)
    largest, names, low, high = certified.choose.bounds(states)
    z = certified.choose.exact(states)
    assert torch.equal(names, words)
    assert torch.allclose((largest - z[:, None]).float(), values, atol=1e-5)
    assert (low - 1e-5 <= z).all()
    assert (z <= high + 1e-5).all()
    for head, error in ((full, 1e-5), (whole, 1e-4), (estimated, 0.2)):
        found, names = head.choose(states)
        assert torch.equal(names, words), head.name
        assert (found - values).abs().max() < error, head.name
    assert (half.choose(states)[0] - values).abs().max() < 0.2
    for head in (alone, *heads.graphs_of_faiss(layer, 6, (400,))):
        found, names = head.choose(states)
        assert torch.equal(names, words), head.name
        assert torch.allclose(found, values.log_softmax(1), atol=1e-5), head.name


@torch.no_grad()
def test_adaptive_softmax_finds_its_own_likeliest_words(layer: Any, tmp_path: Path) -> None:
    contexts, states = torch.randn(2000, 24), torch.randn(64, 24)
    following = layer(contexts).argmax(1)
    file = tmp_path / "adaptive.pt"
    heads.adaptive_softmax(layer, 6, contexts, following, file)
    kept = torch.load(file, weights_only=True)
    kept["model"]["head.bias"][40:] += 4  # so that words of both clusters are among the likeliest
    torch.save(kept, file)
    head = heads.adaptive_softmax(layer, 6, contexts, following, file)
    model = torch.nn.AdaptiveLogSoftmaxWithLoss(24, 400, [40, 200], head_bias=True)
    model.load_state_dict(kept["model"])
    values, words = torch.topk(model.log_prob(states), 6)
    found, names = head.choose(states)
    assert torch.equal(names, words)
    assert torch.allclose(found, values, atol=1e-5)
    assert all(((words >= first) & (words < last)).any() for first, last in ((0, 40), (40, 200), (200, 400)))


def test_the_workload_compares_output_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(texts: list[str], references: list[list[str]]) -> SimpleNamespace:
        same = [text == reference for text, reference in zip(texts, references[0], strict=True)]
        return SimpleNamespace(score=100 * float(np.mean(same)))

    monkeypatch.setattr(translation, "bleu_scorer", lambda: SimpleNamespace(corpus_bleu=score))
    words = ["--generated", "600", "--held-out", "12", "--timed", "2", "--width", "32", "--epochs", "2",
             "--beams", "1,4", "--work", str(tmp_path), "--json", str(tmp_path / "out.json")]  # fmt: skip
    told = CliRunner().invoke(translation.main, words, catch_exceptions=False)
    assert told.exit_code == 0, told.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["beam"] for row in rows} == {1, 4}
    assert len({row["layer"] for row in rows}) == 9
    for row in rows:
        if row["layer"] in ("full, fp32", "TopKSoftmax, certified log Z"):
            assert row["difference"] == 0
            assert row["same"] == 1
    wrong = CliRunner().invoke(translation.main, ["--beams", "1,11"])
    assert wrong.exit_code == 2
    assert "beams of 1 to 10" in wrong.output


def test_a_missing_scorer_is_told_before_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(translation, "import_module", missing)
    told = CliRunner().invoke(translation.main, ["--generated", "200", "--work", str(tmp_path)])
    assert told.exit_code == 1
    assert "sacrebleu is not installed: memhier bench install decode" in told.output
    assert not list(tmp_path.iterdir())


def test_a_missing_corpus_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(translation, "bleu_scorer", lambda: None)
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    told = CliRunner().invoke(translation.main, ["--work", str(tmp_path)])
    assert told.exit_code == 1
    assert "no data set 'multi30k'" in told.output
