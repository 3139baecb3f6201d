"""The scripts in docs/examples: each runs alone on small data, and the figures that it prints have its point."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, find_chromium

FOLDER = Path(__file__).parents[1] / "docs" / "examples"
PAGE = FOLDER.parent / "how-to" / "examples.md"
VOID = {"meta", "br", "link", "img", "input", "hr"}


def run(script: str, *options: str, folder: Path) -> str:
    """Return the text that a script prints, run in an empty folder with warnings as errors."""
    command = [sys.executable, "-W", "error", str(FOLDER / script), *options]
    there = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("tmp*")), "it left a temporary folder behind"
    return done.stdout


def figure(pattern: str, text: str) -> float:
    """Return the one number that a pattern captures."""
    (found,) = re.findall(pattern, text)
    return float(found.replace(",", ""))


def test_replay_keeps_the_first_tasks_of_images(tmp_path):
    printed = run("continual_images.py", "--data", "generated", "--quick", folder=tmp_path)
    none, alone, both = (float(share) for share in re.findall(r": ([\d.]+)%", printed))
    assert both > none + 5
    assert alone > none
    assert figure(r"([\d,]+) on SSD, 0 swapped", printed) == 6_000
    assert figure(r"on SSD, ([1-9][\d,]*) swapped", printed) > 0


def test_images_are_packed_by_each_codec(tmp_path):
    printed = run("packed_images.py", "--data", "generated", "--count", "20", folder=tmp_path)
    plain = figure(r"plain: ([\d,]+) bytes", printed)
    assert figure(r"\nwebp:lossless: ([\d,]+) bytes", printed) < plain
    assert figure(r"\nlossless: ([\d,]+) bytes", printed) <= figure(r"png: ([\d,]+) bytes", printed) < plain


@pytest.mark.long
def test_latents_take_fewer_bytes_and_keep_the_first_classes(tmp_path):
    printed = run("latent_replay.py", "--data", "generated", "--quick", folder=tmp_path)
    none, *kept = (float(share) for share in re.findall(r": ([\d.]+)%", printed))
    assert min(kept) > none + 15
    floats, _, int8, _, codes, _ = (float(count.replace(",", "")) for count in re.findall(r"([\d,]+) latents", printed))
    assert int8 > 3.5 * floats
    assert codes > 9 * floats


@pytest.mark.long
def test_a_share_of_replay_keeps_the_first_domain(tmp_path):
    printed = run("continual_pretraining.py", "--data", "generated", "--quick", folder=tmp_path)
    found = [float(number) for number in re.findall(r"perplexity ([\d.]+) on the first domain,", printed)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 4 * found[-1]


@pytest.mark.long
def test_replay_keeps_the_first_domain_of_a_language_model(tmp_path):
    printed = run("replay_language_model.py", "--quick", folder=tmp_path)
    none, both = (figure(rf"{title}: perplexity ([\d.]+)", printed) for title in ("no replay", "memory and storage"))
    assert 1 < 2 * both < none


@pytest.mark.long
def test_clicks_become_items_that_are_found(tmp_path):
    printed = run("clicks_to_serving.py", "--quick", folder=tmp_path)
    held, rows = re.search(r"DRAM of the tables: ([\d.]+) MiB for ([\d.]+) MiB", printed).groups()
    assert float(held) < float(rows)
    assert "epoch 1" in printed.partition("epoch 2")[0]
    assert figure(r"recall at 20: ([\d.]+)", printed) >= 0.95 - 0.03
    found, exact, chance = (
        figure(rf"{name} ([\d.]+)", printed) for name in ("hit rate at 20:", "exact search", "at random")
    )
    assert exact > 2 * chance
    assert abs(found - exact) <= 0.02


@pytest.mark.long
def test_neighbours_help_a_language_model(tmp_path):
    printed = run("knn_lm.py", "--quick", "--dram", "4MiB", folder=tmp_path)
    alone, both = (figure(rf"{title}: perplexity ([\d.]+)", printed) for title in ("alone", "contexts"))
    assert 1 < both < alone
    held, vectors = re.search(r"DRAM of the index: ([\d.]+) MiB for ([\d.]+) MiB", printed).groups()
    assert float(held) < float(vectors)


@pytest.fixture
def notes(tmp_path) -> Path:
    """A folder of texts on three matters, one with a text that would end a script in a page."""
    folder = tmp_path / "notes"
    folder.mkdir()
    kinds = {"kitchen.txt": "bake bread flour oven yeast dough", "harbour.md": "ship anchor sailor tide boat sea"}
    for name, words in kinds.items():
        parts = words.split()
        texts = [" ".join(parts[(at + step) % 6] for step in range(9)) + f" note{at}" for at in range(20)]
        (folder / name).write_text("\n\n".join(texts))
    (folder / "evil.txt").write_text("</script><b>zebra & quartz</b> <!-- {{DATA}} of eight words or more in all -->")
    (folder / "skipped.csv").write_text("flour oven yeast dough bread bake flour oven yeast dough")
    return folder


def test_semantic_search_finds_texts_and_their_places(notes, tmp_path):
    printed = run("semantic_search.py", "oven and dough", "--folder", str(notes), "--k", "3", folder=tmp_path)
    hits = re.findall(r"^  [\d.]+  (\S+):(\d+)  (.+)$", printed, re.MULTILINE)
    assert [file for file, _, _ in hits] == ["kitchen.txt"] * 3
    lines = (notes / "kitchen.txt").read_text().splitlines()
    assert all(lines[int(line) - 1].startswith(text) for _, line, text in hits)
    filtered = run(
        "semantic_search.py", "oven and dough", "--folder", str(notes), "--where", "line < 3", "--k", "9",
        folder=tmp_path,
    )  # fmt: skip
    assert {line for _, line in re.findall(r"^  [\d.]+  (\S+):(\d+)", filtered, re.MULTILINE)} == {"1"}


class Page(HTMLParser):
    """Tags, attributes and scripts of a page; fails where a tag does not end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: dict[str, str] = {}
        self.kind = ""

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        self.kind = dict(attributes).get("type", "code") if tag == "script" else self.kind
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            self.scripts[self.kind] = self.scripts.get(self.kind, "") + text


def test_the_page_of_semantic_search_is_whole_and_needs_no_other_file(notes, tmp_path):
    place = tmp_path / "page.html"
    options = ["--folder", str(notes), "--k", "4", "--html", str(place)]
    run("semantic_search.py", "zebra & quartz", "oven </script>", *options, folder=tmp_path)
    text, page = place.read_text(), Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert [value for name, value in page.attributes if name in ("src", "href", "srcset", "action")] == ["data:,"]
    assert re.search(r"url\(|@import|import\(|fetch\(|https?:(?!//www\.w3\.org/2000/svg)", text) is None
    data = json.loads(page.scripts["application/json"])
    assert [search["query"] for search in data["searches"]] == ["zebra & quartz", "oven </script>"]
    for search in data["searches"]:
        for run_ in search["runs"]:
            steps = run_["steps"]
            assert steps["candidates"] <= steps["scanned"] <= steps["vectors"] == 41
            assert len(run_["hits"]) == 4
            assert sum(each["codes"] for each in run_["lists"]) == steps["scanned"] == len(run_["records"])
            assert steps["kth"] == run_["hits"][-1]["distance"]
    exact = data["searches"][0]["runs"][-1]
    assert any(hit["text"].startswith("</script><b>zebra & quartz</b>") for hit in exact["hits"])
    if shutil.which("node"):
        (tmp_path / "page.js").write_text(page.scripts["code"])
        subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True, timeout=800)


@pytest.mark.skipif(find_chromium() is None, reason="draws the page in a browser: needs chromium on PATH")
@pytest.mark.parametrize(("width", "dark"), [(1100, False), (360, True)])
def test_a_browser_draws_the_page_of_semantic_search(notes, tmp_path, width, dark):
    place, profile = tmp_path / "page.html", tmp_path / "profile"
    options = ["--folder", str(notes), "--k", "4", "--html", str(place)]
    run("semantic_search.py", "zebra & quartz", "oven </script>", *options, folder=tmp_path)
    page = Page()
    page.feed(place.read_text())
    data = json.loads(page.scripts["application/json"])
    with Browser(find_chromium() or "", profile) as browser:
        browser.show(width, 800, dark=dark)
        browser.open(place)
        for query, search in enumerate(data["searches"]):
            for recall, shown in enumerate(search["runs"]):
                browser.run(f"query.value = {query}; recall.value = {recall}; recall.onchange()")
                check_drawing(browser, shown)
        # Of so few vectors none is admitted and left unread.
        shown = data["searches"][0]["runs"][0]
        for record in shown["records"][-3:]:
            record.update(admitted=True, round=None, distance=None, lower=None)
        browser.run(
            f"Object.assign(data.searches[0].runs[0], {json.dumps(shown)}); query.value = recall.value = 0; show()"
        )
        check_drawing(browser, shown)
        # A user who reads the options sees the queries as they were asked.
        asked = "[...document.getElementById('query').options].map((option) => option.textContent)"
        assert browser.run(asked) == ["zebra & quartz", "oven </script>"]
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        paper, text = (
            sum(map(int, re.findall(r"\d+", browser.run(f"getComputedStyle(document.body).{name}"))))
            for name in ("backgroundColor", "color")
        )
        assert (paper < text) is dark
        assert browser.errors == []
        assert browser.requests == [place.as_uri()]


def check_drawing(browser: Browser, shown: dict[str, Any]) -> None:
    """Assert that lists, candidates, pages and hits are drawn as the data has them, and told in words."""
    steps, found = shown["steps"], [hit["id"] for hit in shown["hits"]]
    lists = browser.run("[...document.querySelectorAll('#lists g')].map((group) => Number(group.dataset.list))")
    assert lists == [each["list"] for each in shown["lists"]]
    script = """[...document.querySelectorAll('#candidates g')].map((group) => [Number(group.dataset.id),
        group.getAttribute('class'), Number(group.querySelector('.interval').getAttribute('x1')),
        Number(group.querySelector('.estimate').getAttribute('x1')), group.querySelectorAll('circle').length])"""
    drawn = browser.run(script)
    assert [name for name, *_ in drawn] == [record["id"] for record in shown["records"]]
    for (name, state, lower, estimate, dots), record in zip(drawn, shown["records"], strict=True):
        read = record["round"] is not None
        states = ("read", "mate") if read else ("spared", "refused")
        assert state == ("found" if name in found else states[not record["admitted"]])
        assert (lower <= estimate, dots) == (True, int(read))
    limits = browser.run("[...document.querySelectorAll('#candidates .limit')].map((line) => line.classList[1])")
    assert limits == [name for name in ("threshold", "kth") if steps[name] is not None]
    pages = browser.run("[...document.querySelectorAll('#pages li')].map((item) => item.textContent)")
    assert len(pages) == len(shown["pages"]) > 0
    assert sum(text.count("\u25cf") for text in pages) == len(found)
    rows = browser.run("[...document.querySelectorAll('#rows tr')].map((row) => row.cells[0].textContent)")
    assert len(rows) == len(shown["records"])
    texts = browser.run("[...document.querySelectorAll('#hits li')].map((item) => item.textContent)")
    assert all(hit["text"][:300] in text for hit, text in zip(shown["hits"], texts, strict=True))
    assert browser.run("document.querySelectorAll('main b.zebra, #hits b, #rows b').length") == 0
    for name in ("words", "lists-words", "candidates-words", "pages-words"):
        assert re.search(r"\d", browser.run(f"document.getElementById('{name}').textContent"))


def test_an_update_of_attributes_writes_its_column(tmp_path):
    printed = run("attribute_updates.py", "--quick", folder=tmp_path)
    assert figure(r": ([\d,]+) kB written", printed) < 100  # a vector alone is 0.5 kB, and 200 change


def test_every_example_is_listed():
    listed = set(re.findall(r"examples/(\w+\.py)", PAGE.read_text()))
    assert listed == {path.name for path in FOLDER.glob("*.py")}
