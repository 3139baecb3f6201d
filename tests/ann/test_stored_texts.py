"""Strings in pages: written in any blocks, read in any order, and no byte of them changed unnoticed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memhier.ann.zoom.ids.stored_texts import StoredTexts, text_pages, write_texts
from memhier.ann.zoom.ids.texts import Texts, as_texts, hash_texts
from memhier.errors import CorruptionError
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import READ_TALLY
from memhier.io.reader import Reader
from memhier.store.store import Store

words = st.text(min_size=1, max_size=12) | st.integers(1, 1024).map("x".__mul__)
strings = st.lists(words.filter(lambda text: text.isascii() or text.isprintable()), max_size=40)


def as_list(texts):
    return texts.objects().tolist()


def write(place, texts, cuts=()):
    edges = [0, *sorted(cuts), len(texts)]
    with Store.create(place, kind="test") as store, store.begin() as tx:
        write_texts(tx, "t", [texts.part(low, high) for low, high in pairwise(edges)])
        tx.commit()


@given(texts=strings, data=st.data())
def test_texts_are_a_list_of_strings(texts, data):
    made = as_texts(texts)
    assert as_list(made) == texts
    assert made.longest == max((len(text.encode()) for text in texts), default=0)
    rows = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=20)) if texts else []
    assert as_list(made.take(np.array(rows, np.int64))) == [texts[row] for row in rows]
    low = data.draw(st.integers(0, len(texts)))
    high = data.draw(st.integers(low, len(texts)))
    assert as_list(made.part(low, high)) == texts[low:high]
    assert as_list(Texts.joined([made.part(low, high), made])) == texts[low:high] + texts
    assert [made[row] for row in rows] == [texts[row] for row in rows]
    reverse = made.take(np.arange(len(texts))[::-1])
    assert made.equal(reverse).tolist() == [a == b for a, b in zip(texts, texts[::-1], strict=True)]
    assert hash_texts(reverse).tolist() == hash_texts(made).tolist()[::-1]
    assert (hash_texts(made) >= 0).all()


def test_a_hash_is_the_same_on_every_machine():
    assert hash_texts(as_texts(["a", "漢"])).tolist() == [1702698405120146464, 6258228981428187551]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=strings, data=st.data())
def test_written_strings_are_read(tmp_path_factory, texts, data):
    place, made = tmp_path_factory.mktemp("texts") / "store", as_texts(texts)
    write(place, made, data.draw(st.lists(st.integers(0, len(texts)), max_size=3)))
    rows = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=60)) if texts else []
    with Store.open(place, kind="test") as store, Reader() as reader:
        stored = StoredTexts(store, "t", len(texts), reader)
        assert len(stored) == len(texts)
        assert as_list(stored.read(np.array(rows, np.int64))) == [texts[row] for row in rows]
        pages = store.segments()["t"].length // PAGE_BYTES
        assert pages <= text_pages(len(texts), len(made.letters), made.longest)
        assert stored.memory_bytes == 8 * (pages + 1)
        if texts:
            with pytest.raises(CorruptionError, match="do not hold the ids"):
                StoredTexts(store, "t", len(texts) - 1, reader)


def test_a_page_is_read_once_and_many_in_a_submission(tmp_path):
    texts = [f"{row:011d}" * 4 for row in range(9700)]  # of which 89 fill a page
    write(tmp_path / "store", as_texts(texts))
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(9700), 2))
    with Store.open(tmp_path / "store", kind="test") as store, Reader() as reader:
        stored, tally = StoredTexts(store, "t", 9700, reader), np.zeros(1, READ_TALLY)
        assert as_list(stored.read(rows, tally)) == [texts[row] for row in rows]
        pages = store.segments()["t"].length // PAGE_BYTES
        assert tally["pages"][0] == pages == -(-9700 // 89)
        assert tally["reads"][0] < pages / 4


@pytest.mark.parametrize("segment", ["t", "t-rows"])
def test_no_byte_changes_unnoticed(tmp_path, segment):
    texts = as_texts([f"{row}" * 9 for row in range(97)])
    write(tmp_path / "store", texts)
    with Store.open(tmp_path / "store", kind="test") as store, Reader(direct=False) as reader:
        stored, path = StoredTexts(store, "t", 97, reader), store.segments()[segment].path
        good = path.read_bytes()
        assert len(good) == PAGE_BYTES
        with path.open("r+b", buffering=0) as file:
            for at in range(PAGE_BYTES):
                file.seek(at)
                file.write(bytes([good[at] ^ 1 << at % 8]))
                again = stored if segment == "t" else None
                with pytest.raises(CorruptionError):
                    (again or StoredTexts(store, "t", 97, reader)).read(np.arange(97))
                file.seek(at)
                file.write(good[at : at + 1])
        assert len(stored.read(np.arange(97))) == 97


def test_pages_that_nobody_checks_do_not_lead_astray(tmp_path):
    write(tmp_path / "store", as_texts([f"{row}" * 9 for row in range(97)]))
    with Store.open(tmp_path / "store", kind="test", verify="off") as store, Reader() as reader:
        path = store.segments()["t"].path
        page = np.frombuffer(path.read_bytes(), "<u2").copy()
        page[5] = 60000
        path.write_bytes(page.tobytes())
        with pytest.raises(CorruptionError, match="does not hold the ids"):
            StoredTexts(store, "t", 97, reader).read(np.arange(97))
