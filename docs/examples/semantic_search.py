"""Search the text files of a folder by meaning, and show how the search decided.

The files are cut into paragraphs. Each becomes a vector: the weights of its words, on the leading directions of all
paragraphs, so that words which occur together lie near each other. The index holds the vectors on SSD, and beside them
the text, the file and the line of each paragraph, which come back with the hits.

    python docs/examples/semantic_search.py                             # the documents of this repository
    python docs/examples/semantic_search.py "full disk" --folder ~/notes --suffixes .txt .md
    python docs/examples/semantic_search.py "read many pages" --suffixes .md .py --html page.html     # more paragraphs
    python docs/examples/semantic_search.py "full disk" --where "file == 'README.md'"
    python docs/examples/semantic_search.py --model all-MiniLM-L6-v2    # vectors of sentence-transformers, if installed
    python docs/examples/semantic_search.py --html page.html            # a page to open in a browser

It prints the hits of each query. The page shows for each query and several recalls which part of the index was probed,
admitted by the bounds and read, the hits, and the distances around the last hit. It needs no network.
"""

import argparse
import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from memhier.ann import ZoomIndex

QUERIES = ("what happens when the disk is full", "train embedding tables larger than memory", "filter by attributes")
RECALLS = (0.8, 0.9, 0.99, 1.0)
# The repository that this script lies in, or the current folder for a copy elsewhere.
FOLDER = next((place for place in Path(__file__).resolve().parents if (place / "docs").is_dir()), Path())


def read_passages(folder: Path, suffixes: list[str]) -> dict[str, list[Any]]:
    """Return the paragraphs of at least eight words: their texts, files and lines."""
    found: dict[str, list[Any]] = {"text": [], "file": [], "line": []}
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "build")
        for path in (Path(place, name) for name in sorted(files) if Path(name).suffix in suffixes):
            text = path.read_text("utf-8", "replace")
            for match in re.finditer(r"(?:.*\S.*\n?)+", text):
                if len(match.group().split()) >= 8:
                    line = text.count("\n", 0, match.start()) + 1
                    for column, value in zip(found.values(), (match.group().strip(), path, line), strict=True):
                        column.append(value)
    return found | {"file": [path.relative_to(folder).as_posix() for path in found["file"]]}


class WordSpace:
    """Vectors without a network: TF-IDF on the leading singular directions, block by block."""

    def __init__(self, texts: list[str], dimension: int = 96, most: int = 6_000, seed: int = 0) -> None:
        counts = Counter(word for text in texts for word in set(self._words(text)))
        kept = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:most]
        self._column = {word: at for at, (word, _) in enumerate(kept)}
        self._rarity = np.log(len(texts) / np.array([count for _, count in kept]), dtype=np.float32) + 0.1
        directions = np.random.default_rng(seed).normal(size=(len(kept), min(dimension, len(kept)))).astype(np.float32)
        for _ in range(3):  # subspace iteration
            blocks = (self._weights(texts[at : at + 500]) for at in range(0, len(texts), 500))
            directions = np.linalg.qr(sum(block.T @ (block @ directions) for block in blocks))[0]
        self._directions = directions

    @staticmethod
    def _words(text: str) -> list[str]:
        return [word.rstrip("s") for word in re.findall(r"[a-z0-9]{2,}", text.lower())]

    def _weights(self, texts: list[str]) -> np.ndarray:
        found = np.zeros((len(texts), len(self._column)), np.float32)
        for row, text in enumerate(texts):
            for word, count in Counter(self._words(text)).items():
                if word in self._column:
                    found[row, self._column[word]] = (1 + np.log(count)) * self._rarity[self._column[word]]
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)

    def encode(self, texts: list[str]) -> np.ndarray:
        """Return vectors, float32 [n, dimension]; a text without a known word has zeros."""
        return np.concatenate(
            [self._weights(texts[at : at + 500]) @ self._directions for at in range(0, len(texts), 500)]
        )


def explained(index: ZoomIndex, query: str, vector: np.ndarray, k: int, where: str | None) -> dict[str, Any]:
    """Return one query's search at several recalls as plain values, for the page."""
    runs = []
    for recall in RECALLS:
        hits = index.search(vector, k, recall=recall, where=where, fields=True).rows()
        explanation = index.explain(vector, k, recall=recall, where=where)
        runs.append({"recall": recall, "hits": hits, "steps": explanation.to_dict(), "words": str(explanation)})
    around = index.search(vector, 4 * k, recall=1.0, where=where)
    neighbours = [{"id": hit["id"], "distance": hit["distance"]} for hit in around.rows()]
    return {"query": query, "runs": runs, "neighbours": neighbours}


def main() -> None:
    """Read the arguments, build the index, and search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queries", nargs="*", default=QUERIES)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of text files; by default the repository")
    parser.add_argument("--suffixes", nargs="+", default=[".md", ".txt", ".rst"])
    parser.add_argument("--model", help="of sentence-transformers")
    parser.add_argument("--where", help="a filter on file and line")
    parser.add_argument("--k", type=int, default=5, help="hits of a query (default: 5)")
    parser.add_argument("--dram", default="4MiB", help="for the index (default: 4MiB)")
    parser.add_argument("--html", type=Path, help="write a page that explains each search")
    parser.add_argument("--index", type=Path, help="a new directory for the index; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="only the files at the top of the folder")
    args = parser.parse_args()

    passages = read_passages(args.folder, args.suffixes)
    if args.quick:
        top = [at for at, file in enumerate(passages["file"]) if "/" not in file]
        passages = {name: [column[at] for at in top] for name, column in passages.items()}
    if not passages["text"]:
        parser.error(f"no paragraph in files {args.suffixes} below {args.folder}")
    if args.model is None:
        encode = WordSpace(passages["text"], seed=args.seed).encode
    else:
        from sentence_transformers import SentenceTransformer

        encode = SentenceTransformer(args.model).encode
    vectors, asked = encode(passages["text"]), encode(list(args.queries))

    with tempfile.TemporaryDirectory() as folder:
        attributes = {"file": passages["file"], "line": passages["line"]}
        with ZoomIndex.build(
            args.index or Path(folder) / "texts.index", vectors, attributes=attributes,
            documents={"text": passages["text"]}, metric="cosine", dram=args.dram, seed=args.seed,
        ) as index:  # fmt: skip
            print(f"{len(index):,} paragraphs; {index.memory_bytes / 2**10:.0f} KiB of DRAM, "
                  f"{vectors.nbytes / 2**10:.0f} KiB of vectors")  # fmt: skip
            found = index.search(asked, args.k, where=args.where, fields=True)
            for query, hits in zip(args.queries, found.rows(), strict=True):
                print(f"\n{query}")
                for hit in hits:
                    start = " ".join(hit["text"].split())[:90]
                    print(f"  {hit['distance']:.3f}  {hit['file']}:{hit['line']}  {start}")
            if args.html is not None:
                data = [explained(index, *pair, args.k, args.where) for pair in zip(args.queries, asked, strict=True)]
                text = json.dumps({"k": args.k, "searches": data}).replace("<", "\\u003c")
                args.html.write_text(PAGE.replace("{{DATA}}", text), "utf-8")
                print(f"\n{args.html}: open it in a browser")


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>How a search decided</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 52em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
svg { width: 100% } pre { white-space: pre-wrap; background: #f4f4f4; padding: .5em } li { margin: .5em 0 }
</style>
</head>
<body>
<h1>How a search decided</h1>
<p><label>Query <select id="query"></select></label> <label>Recall <select id="recall"></select></label></p>
<h2>Probed, admitted, read</h2>
<svg id="steps" viewBox="0 0 800 150" role="img" aria-label="The steps of the search"></svg>
<pre id="words"></pre>
<p>A read brings a whole page, and all vectors on it are ranked: more than were admitted.</p>
<h2>Around the last hit</h2>
<svg id="around" viewBox="0 0 800 90" role="img" aria-label="Exact distances of the nearest vectors"></svg>
<p>Each mark is a vector at its exact distance, the nearest left: <b style="color:#0a6">found</b>, <b
style="color:#c30">missed at this recall</b>, <b style="color:#888">beyond the hits</b>. The line is the last hit's
distance. The search read pages until no candidate was left whose lower bound lay left of it.</p>
<h2>Hits</h2>
<ol id="hits"></ol>
<script type="application/json" id="data">{{DATA}}</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [query, recall] = ["query", "recall"].map((id) => document.getElementById(id));
function draw(place, name, attributes, text) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
  if (text !== undefined) shape.textContent = text;
  place.append(shape);
}
function show() {
  const search = data.searches[query.value], run = search.runs[recall.value], steps = run.steps;
  const [bars, around, hits] = ["steps", "around", "hits"].map((id) => document.getElementById(id));
  for (const place of [bars, around, hits]) place.replaceChildren();
  const rows = [["lists probed", steps.probed, steps.lists], ["codes scanned", steps.scanned, steps.vectors],
    ["candidates admitted", steps.candidates, steps.vectors], ["vectors read and ranked", steps.ranked, steps.vectors],
    ["vectors found", run.hits.length, steps.vectors]];
  rows.forEach(([name, count, all], row) => {
    const y = 8 + 28 * row, width = 440 * count / Math.max(all, 1);
    draw(bars, "rect", {x: 190, y, width: 440, height: 20, fill: "#eee"});
    draw(bars, "rect", {x: 190, y, width, height: 20, fill: "#37b"});
    draw(bars, "text", {x: 182, y: y + 15, "font-size": 14, "text-anchor": "end"}, name);
    draw(bars, "text", {x: 638, y: y + 15, "font-size": 14}, `${count} of ${all}`);
  });
  document.getElementById("words").textContent = run.words;
  const found = new Set(run.hits.map((hit) => hit.id)), last = run.hits.at(-1)?.distance ?? 0;
  const [low, high] = [search.neighbours[0]?.distance ?? 0, Math.max(last, search.neighbours.at(-1)?.distance ?? 1)];
  const at = (distance) => 20 + 760 * (distance - low) / Math.max(high - low, 1e-9);
  search.neighbours.forEach(({id, distance}, rank) => {
    const fill = found.has(id) ? "#0a6" : rank < data.k ? "#c30" : "#aaa";
    draw(around, "circle", {cx: at(distance), cy: 45, r: 6, fill, "fill-opacity": 0.7});
  });
  draw(around, "line", {x1: at(last), x2: at(last), y1: 15, y2: 75, stroke: "#222"});
  draw(around, "text", {x: 20, y: 88, "font-size": 14}, low.toFixed(3));
  draw(around, "text", {x: 780, y: 88, "font-size": 14, "text-anchor": "end"}, high.toFixed(3));
  for (const hit of run.hits) {
    const item = document.createElement("li");
    item.textContent = `${hit.distance.toFixed(3)}  ${hit.file}:${hit.line}  ${hit.text.slice(0, 300)}`;
    hits.append(item);
  }
}
data.searches.forEach((search, at) => query.add(new Option(search.query, at)));
data.searches[0].runs.forEach((run, at) => recall.add(new Option(run.recall, at)));
recall.value = data.searches[0].runs.findIndex((run) => run.recall === 0.99);
query.onchange = recall.onchange = show;
show();
</script>
</body>
</html>
"""


if __name__ == "__main__":
    main()
