"""The demo's vectors: words, n-grams and hashes against plain references; the projection under a seed."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memhier.benchmarks.cli.demo.corpus import Corpus, Listing, ReadFile, write_corpus
from memhier.benchmarks.cli.demo.extract import Function
from memhier.benchmarks.cli.demo.projection import DIMENSION, Projection
from memhier.benchmarks.cli.demo.text import (
    FIELD_WEIGHTS,
    hash_words,
    ngrams,
    split_words,
    unit_rows,
    weigh_function,
    weigh_query,
)

plain_words = st.text(st.sampled_from("abcxyzé7"), min_size=1, max_size=24)


def plain_ngrams(word: str) -> list[str]:
    bounded = "<" + word + ">"
    found = []
    for n in (3, 4, 5):
        for i in range(len(bounded)):
            gram = bounded[i : i + n]
            if len(gram) == n:
                found.append(gram)
    if bounded not in found:
        found.append(bounded)
    return found


def plain_hash(word: str, dimension: int, seed: int) -> np.ndarray:
    vector = np.zeros(dimension)
    for gram in plain_ngrams(word):
        digest = hashlib.blake2b(gram.encode(), digest_size=16, key=seed.to_bytes(8, "little")).digest()
        for i in range(8):
            number = digest[2 * i] + 256 * digest[2 * i + 1]
            vector[number % 32768 % dimension] += -1 if number < 32768 else 1
    length = np.sqrt((vector**2).sum())
    return vector / length if length else vector


@given(plain_words)
def test_ngrams_equal_the_plain_definition(word: str) -> None:
    assert ngrams(word) == plain_ngrams(word)


@given(st.lists(plain_words, max_size=5), st.sampled_from([1, 3, 97, 512]), st.integers(0, 2**64 - 1))
def test_hashes_equal_the_plain_definition(words: list[str], dimension: int, seed: int) -> None:
    expected = np.array([plain_hash(word, dimension, seed) for word in words]).reshape(len(words), dimension)
    vectors = hash_words(words, dimension, seed)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_words_that_share_ngrams_are_similar_and_others_are_not() -> None:
    parse, parser, zebra = hash_words(["parse", "parser", "zebra"], 512, 0)
    assert parse @ parser > 0.4
    assert abs(parse @ zebra) < 0.2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []), ("__init__", ["init"]), ("getHTTPResponseCode", ["get", "http", "response", "code"]),
        ("utf8_decode", ["utf", "8", "decode"]),
        ("Über naïve_getHTTP ~ x2", ["über", "naïve", "get", "http", "x", "2"]),
        ("A x " + "q" * 40, ["a", "x", "q" * 24]), ("%$ \n\ud800", []),
    ],
)  # fmt: skip
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_weights_are_square_roots_of_weighted_counts() -> None:
    function = Function("pkg.Dog.bark", "def bark(loud)", "f.py", 1, "Secret phrase.", "loud loud", "bark pkg pkg")
    weights = weigh_function(function)
    field = FIELD_WEIGHTS
    assert weights["bark"] == pytest.approx((field["name"] + field["signature"] + field["code"]) ** 0.5)
    assert weights["pkg"] == pytest.approx((field["qualifier"] + 2 * field["code"]) ** 0.5)
    assert weights["loud"] == pytest.approx((field["signature"] + 2 * field["documentation"]) ** 0.5)
    assert "secret" not in weights
    assert "phrase" not in weights
    assert weigh_query("Loud, LOUD!") == {"loud": pytest.approx(2**0.5)}


def test_unit_rows_leave_zeros_alone() -> None:
    rows = unit_rows(np.array([[3, 4], [0, 0]], np.float32))
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0, 0]], rtol=1e-6)


def made_corpus(folder: Path, functions: int, seed: int = 0) -> Corpus:
    """Write a corpus of random words, with frequent and rare ones."""
    generator = np.random.default_rng(seed)
    results = []
    for i in range(functions):
        words = {f"word{int(n)}": float(1 + n % 3) for n in generator.geometric(0.02, generator.integers(1, 60))}
        listing = Listing(f"m.f{i}", f"def f{i}()", "m.py", i + 1, f"Sentence {i}.")
        results.append([ReadFile(listing, i.to_bytes(8, "little"), words)])
    folder.mkdir(exist_ok=True)
    write_corpus(folder, results, None)
    return Corpus(folder)


def plain_vectors(corpus: Corpus) -> np.ndarray:
    """Sketch the corpus in float64 as one dense matrix and return the truncated SVD's coordinates, at unit length."""
    matrix = np.zeros((len(corpus), len(corpus.vocabulary)))
    for row in range(len(corpus)):
        words = corpus.words([row])
        matrix[row, words.numbers] = words.weights
    frequency = np.log((len(corpus) + 1) / ((matrix > 0).sum(0) + 0.5)) ** 0.7
    sketch = (matrix * frequency) @ np.array([plain_hash(word, 512, 0) for word in corpus.vocabulary])
    sketch /= np.linalg.norm(sketch, axis=1, keepdims=True)
    _, _, right = np.linalg.svd(sketch, full_matrices=False)
    vectors = sketch @ right[:256].T
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_projection_is_the_truncated_svd_of_the_sketch(tmp_path: Path) -> None:
    corpus = made_corpus(tmp_path, 300)
    vectors = np.concatenate(list(Projection.fit(corpus, 0).vectors(corpus)))
    expected = plain_vectors(corpus)
    # Coordinates are fixed up to rotation, similarities altogether.
    np.testing.assert_allclose(vectors @ vectors.T, expected @ expected.T, atol=2e-3)


def test_the_projection_depends_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    corpus = made_corpus(tmp_path, 97)
    first, again, other = (
        np.concatenate(list(Projection.fit(corpus, seed).vectors(corpus))) for seed in (5, 5, 6)
    )  # fmt: skip
    assert np.array_equal(first, again)
    assert not np.allclose(first @ first.T, other @ other.T, atol=1e-3)


@pytest.fixture(scope="module")
def projected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Projection, Corpus]:
    corpus = made_corpus(tmp_path_factory.mktemp("blocks"), 97)
    return Projection.fit(corpus, 0), corpus


@pytest.mark.parametrize("block", [1, 3, 50, 96, 97])
def test_the_block_changes_nothing(projected: tuple[Projection, Corpus], block: int) -> None:
    projection, corpus = projected
    blocks = list(projection.vectors(corpus, block))
    assert {len(part) for part in blocks[:-1]} <= {block}
    whole = np.concatenate(list(projection.vectors(corpus)))
    assert whole.shape == (97, DIMENSION)
    assert np.array_equal(np.concatenate(blocks), whole)


def test_a_loaded_projection_is_the_saved_one_and_queries_do_not_need_known_words(tmp_path: Path) -> None:
    corpus = made_corpus(tmp_path / "corpus", 3)
    projection = Projection.fit(corpus, 3)
    projection.save(tmp_path / "projection.npz")
    texts = ["word7 and unheard of", "word1"]
    queries = projection.queries(texts)
    assert np.array_equal(queries, Projection.load(tmp_path / "projection.npz").queries(texts))
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(projection.queries(texts[1:]), queries[1:], atol=1e-6)


def test_a_query_without_words_is_refused() -> None:
    projection = Projection(["a"], np.ones(1, np.float32), 1.0, np.eye(512, 256, dtype=np.float32), 0)
    with pytest.raises(ValueError, match=r"'\?!' holds no word"):
        projection.queries(["fine", "?!"])
