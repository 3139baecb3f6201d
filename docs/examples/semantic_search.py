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

It prints the hits of each query. The page shows for each query and several recalls the lists that were scanned, the
candidates with their bounds, those that were admitted and read, the pages, and the hits. It needs no network.
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

from memhier.ann import Explanation, ZoomIndex

QUERIES = ("what happens when the disk is full", "train embedding tables larger than memory", "filter by attributes")
RECALLS = (0.8, 0.9, 0.99, 1.0)
MOST_DRAWN = 150
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


def drawn(told: Explanation, found: set[int]) -> dict[str, Any]:
    """Return lists, pages and candidates of a search as plain values: sums of all, and as many rows as are drawn."""
    steps = told.to_dict()
    records, scans = steps.pop("records"), steps.pop("scans")
    lists = {number: {"list": number, "codes": codes, "admitted": 0, "read": 0} for number, codes in scans}
    pages: dict[int, dict[str, int]] = {}
    for record in records:
        if record["list"] in lists:
            lists[record["list"]]["admitted"] += record["admitted"]
            lists[record["list"]]["read"] += record["round"] is not None
        if record["round"] is not None:
            page = {"page": record["page"], "round": record["round"], "found": 0, "read": 0, "mate": 0}
            state = "found" if record["id"] in found else "read" if record["admitted"] else "mate"
            pages.setdefault(record["page"], page)[state] += 1
    return {
        "steps": steps,
        "lists": list(lists.values())[:MOST_DRAWN],
        "pages": sorted(pages.values(), key=lambda page: (page["round"], page["page"]))[:MOST_DRAWN],
        "records": records[:MOST_DRAWN],
        "told": len(records),
    }


def explained(index: ZoomIndex, query: str, vector: np.ndarray, k: int, where: str | None) -> dict[str, Any]:
    """Return one query's search at several recalls as plain values, for the page."""
    runs = []
    for recall in RECALLS:
        hits = index.search(vector, k, recall=recall, where=where, fields=True).rows()
        told = index.explain(vector, k, recall=recall, where=where)
        found = {hit["id"] for hit in hits}
        runs.append({"recall": recall, "hits": hits, "words": str(told), **drawn(told, found)})
    return {"query": query, "runs": runs}


def write_page(place: Path, searches: list[dict[str, Any]], passages: dict[str, list[Any]]) -> None:
    """Write the page that explains searches."""
    shown = {record["id"] for search in searches for run in search["runs"] for record in run["records"]}
    names = {}
    for at in shown:
        file, line, start = passages["file"][at], passages["line"][at], " ".join(passages["text"][at].split())[:60]
        names[at] = f"{file}:{line} {start}", f"{Path(file).name}:{line} {start}"[:32]
    # No text of a document ends the script that holds the data.
    data = json.dumps({"names": names, "searches": searches}).replace("<", "\\u003c")
    place.write_text(PAGE.replace("{{DATA}}", data), "utf-8")


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
                pairs = zip(args.queries, asked, strict=True)
                write_page(args.html, [explained(index, *pair, args.k, args.where) for pair in pairs], passages)
                print(f"\n{args.html}: open it in a browser")


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>How a search decided</title>
<style>
:root { color-scheme: light dark; --text: #1d1d1f; --paper: #fff; --faint: #d3d3d9; --found: #087a4b; --read: #1763a6;
  --mate: #6b5aa8; --spared: #a85300; --refused: #6e6e73 }
@media (prefers-color-scheme: dark) {
  :root { --text: #ececf0; --paper: #17171a; --faint: #4b4b54; --found: #4fce94; --read: #74b8ff; --mate: #b6a6f2;
    --spared: #f2a65e; --refused: #9d9da6 }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: var(--text);
  background: var(--paper) }
h1 { font-size: 1.5rem; line-height: 1.2 } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem } p { margin: .4rem 0 }
form { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem } label { max-width: 100% }
select { font: inherit; max-width: 100%; min-height: 2rem }
svg { display: block; width: 100%; font: 12px system-ui, sans-serif } svg text { fill: var(--text) }
.legend, .pages { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: .9rem }
.legend b { font-weight: normal } .legend b::before { content: attr(data-mark); margin-right: .35em }
.found { --state: var(--found) } .read { --state: var(--read) } .mate { --state: var(--mate) }
.spared { --state: var(--spared) } .refused { --state: var(--refused) }
.legend b, .pages i { color: var(--state) }
.interval { stroke: var(--state); stroke-width: 3 } .refused .interval, .mate .interval { stroke-width: 1 }
.estimate { stroke: var(--state); stroke-width: 2 }
.exact { fill: var(--state); stroke: var(--state); stroke-width: 2 }
.read .exact, .mate .exact { fill: var(--paper) }
.bar-codes { fill: var(--faint) } .bar-admitted { fill: var(--spared) } .bar-read { fill: var(--read) }
.limit { stroke: var(--text); stroke-width: 1.5 } .kth { stroke-dasharray: 5 3 }
.pages { gap: .5rem } .pages li { border: 1px solid var(--refused); border-radius: 4px; padding: .2rem .5rem }
.pages i { font-style: normal; letter-spacing: .1em; overflow-wrap: anywhere }
.table { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
td, th { border-bottom: 1px solid var(--faint); padding: .15rem .5rem; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
#hits li { margin: .4rem 0; overflow-wrap: anywhere }
</style>
</head>
<body>
<main>
<h1>How a search decided</h1>
<noscript><p>This page draws with JavaScript, which is off.</p></noscript>
<form><label>Query <select id="query"></select></label>
<label>Declared recall <select id="recall"></select></label></form>
<p id="words" aria-live="polite"></p>
<h2>1. Lists: where it looked</h2>
<p id="lists-words"></p>
<svg id="lists" role="img" aria-labelledby="lists-words"></svg>
<h2>2. Candidates: the decisions of the bounds</h2>
<p>Each row is a paragraph. A short code in DRAM gives an interval for its distance: the line from the lower to the
upper bound, with a tick at the estimate. A line that begins right of <b>refused beyond</b> cannot be among the hits, as
far as the bounds hold, and is not asked for. The others are read in the order of their lower bounds. A dot is the exact
distance, known once the page was read. Reads end where the next line begins right of <b>last hit</b>.</p>
<ul class="legend">
<li><b class="found" data-mark="●">found</b></li>
<li><b class="read" data-mark="○">admitted and read</b></li>
<li><b class="spared" data-mark="━">admitted, not read</b></li>
<li><b class="mate" data-mark="◌">refused, on a page read for another</b></li>
<li><b class="refused" data-mark="─">refused</b></li>
</ul>
<p id="candidates-words"></p>
<svg id="candidates" role="img" aria-labelledby="candidates-words"></svg>
<details><summary>The candidates as a table</summary>
<div class="table" role="region" aria-label="Candidates" tabindex="0"><table>
<thead><tr><th>paragraph</th><th>decision</th><th>list</th><th>page</th><th>round</th><th>lower bound</th>
<th>estimate</th><th>upper bound</th><th>exact distance</th></tr></thead><tbody id="rows"></tbody></table></div>
</details>
<h2>3. Pages that it read</h2>
<p id="pages-words"></p>
<ol id="pages" class="pages"></ol>
<h2>4. Hits</h2>
<ol id="hits"></ol>
</main>
<script type="application/json" id="data">{{DATA}}</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const WORDS = {found: "found", read: "admitted and read", spared: "admitted, not read",
  mate: "refused, on a page read for another", refused: "refused"};
const MARKS = {found: "●", read: "○", mate: "◌"};
const MOST_DRAWN = 60;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const short = (number) => number === null ? "-" : number.toFixed(3);

function put(place, name, attributes = {}, text) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
  if (text !== undefined) shape.textContent = text;
  place.append(shape);
  return shape;
}
function add(place, name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  place.append(made);
  return made;
}
function canvas(id, height) {
  const place = byId(id), width = Math.max(280, Math.round(place.getBoundingClientRect().width));
  place.replaceChildren();
  place.setAttribute("viewBox", `0 0 ${width} ${height}`);
  place.style.height = `${height}px`;
  return [place, width];
}
function drawLists({lists, steps}) {
  const [place, width] = canvas("lists", 110), most = Math.max(1, ...lists.map((list) => list.codes));
  const step = Math.min(40, width / Math.max(1, lists.length));
  const sums = ["codes", "admitted", "read"].map((name) => lists.reduce((sum, list) => sum + list[name], 0));
  const part = lists.length < steps.probed ? `, ${lists.length} drawn` : "";
  byId("lists-words").textContent = "Each bar is a list of vectors that lie near each other, the list nearest to the " +
    `query first: ${count(steps.probed, "list")} of ${steps.lists.toLocaleString("en")} scanned${part}. ` +
    `Grey: ${count(sums[0], "code")} compared. Blue: ${sums[2].toLocaleString("en")} of their vectors read. ` +
    `Orange, narrow: ${sums[1].toLocaleString("en")} admitted by the bounds.`;
  lists.forEach((list, at) => {
    const group = put(place, "g", {"data-list": list.list}), x = at * step, wide = step - Math.min(2, step / 4);
    put(group, "title", {}, `list ${list.list}: ${list.codes} codes, ${list.admitted} admitted, ${list.read} read`);
    for (const [name, share] of [["codes", 1], ["read", 1], ["admitted", 0.4]]) {
      const height = 90 * list[name] / most, width = wide * share;
      put(group, "rect", {class: `bar-${name}`, x: x + (wide - width) / 2, y: 100 - height, width, height});
    }
  });
}
function scaleOf(limits, drawn, left, right) {
  // One code with wide bounds would leave no room for the others: its line ends at the border.
  const values = [...limits.filter((value) => value !== null), ...drawn.map((row) => row.estimate)];
  const [least, high] = [Math.min(...values), Math.max(...values)], low = least - 0.1 * (high - least);
  const step = (right - left) / Math.max(high - low, 1e-9);
  return [low, high, (value) => Math.min(right, Math.max(left, left + step * (value - low)))];
}
function drawCandidates({records, steps}, stateOf) {
  const drawn = records.filter((row) => row.estimate !== null).slice(0, MOST_DRAWN), top = 44, tall = 15;
  const [place, width] = canvas("candidates", top + tall * drawn.length + 24), left = width > 640 ? 230 : 8;
  const [low, high, at] = scaleOf([steps.threshold, steps.kth], drawn, left + 8, width - 10);
  const unread = drawn.filter((row) => stateOf(row) === "spared").length;
  const wider = steps.last_eps === null ? "" : " at first, and in the last round all within the last hit's distance";
  byId("candidates-words").textContent = `${count(steps.scanned, "code")} compared, ${steps.candidates} ` +
    `admitted${wider}. Drawn: the ${count(drawn.length, "code")} with the least lower bounds, of which ${unread} ` +
    "were admitted and not read; lines and dots beyond the borders end there. " +
    `Refused beyond ${short(steps.threshold)}; last hit at ${short(steps.kth)}.`;
  const end = top + tall * drawn.length;
  const limits = [[steps.threshold, "threshold", "refused beyond", 14], [steps.kth, "kth", "last hit", 32]];
  for (const [value, kind, words, y] of limits.filter(([value]) => value !== null)) {
    const x = at(value), anchor = x > width / 2 ? "end" : "start";
    put(place, "line", {class: `limit ${kind}`, x1: x, x2: x, y1: y - 10, y2: end});
    put(place, "text", {x: x + (anchor === "end" ? -5 : 5), y, "text-anchor": anchor}, `${words} ${short(value)}`);
  }
  drawn.forEach((row, rank) => {
    const y = top + tall * (rank + 0.5), state = stateOf(row), [name, label] = data.names[row.id];
    const group = put(place, "g", {class: state, "data-id": row.id});
    const lower = row.lower ?? low, upper = row.lower === null ? high : 2 * row.estimate - row.lower;
    const bounds = `${short(row.lower)} to ${short(upper)}`;
    put(group, "title", {}, `${name}: ${WORDS[state]}; bounds ${bounds}, exact ${short(row.distance)}`);
    if (left > 8) put(group, "text", {x: left - 6, y: y + 4, "text-anchor": "end"}, label);
    put(group, "line", {class: "interval", x1: at(lower), x2: at(upper), y1: y, y2: y});
    put(group, "line", {class: "estimate", x1: at(row.estimate), x2: at(row.estimate), y1: y - 5, y2: y + 5});
    if (row.distance !== null) put(group, "circle", {class: "exact", cx: at(row.distance), cy: y, r: 4});
  });
  put(place, "text", {x: left + 8, y: end + 18}, `distance ${short(low)}`);
  put(place, "text", {x: width - 10, y: end + 18, "text-anchor": "end"}, short(high));
}
function fillTable({records}, stateOf) {
  const body = byId("rows");
  body.replaceChildren();
  for (const row of records) {
    const line = add(body, "tr"), upper = row.lower === null ? null : 2 * row.estimate - row.lower;
    add(line, "td", data.names[row.id][0]);
    add(line, "td", WORDS[stateOf(row)]);
    for (const value of [row.list, row.page, row.round]) add(line, "td", value === null ? "-" : value, "number");
    for (const value of [row.lower, row.estimate, upper, row.distance]) add(line, "td", short(value), "number");
  }
}
function drawPages({pages, steps, told}) {
  const place = byId("pages"), read = steps.pages + steps.hot_pages;
  place.replaceChildren();
  byId("pages-words").textContent = `${count(read, "page read")} in ${count(steps.rounds, "round")}; ` +
    `${count(pages.length, "page")} drawn. A page of 4 KiB brings all vectors on it: ` +
    `${count(steps.ranked, "vector")} compared exactly, of which ${steps.candidates} had been admitted. ` +
    `A mark is a vector among the ` +
    `${count(told, "code")} with the least lower bounds.`;
  for (const page of pages) {
    const item = add(place, "li", `page ${page.page}, round ${page.round}: `);
    for (const state of ["found", "read", "mate"])
      if (page[state]) {
        const marks = add(item, "i", MARKS[state].repeat(page[state]), state);
        marks.setAttribute("role", "img");
        marks.setAttribute("aria-label", `${page[state]} ${WORDS[state]}`);
      }
  }
}
function show() {
  const run = data.searches[query.value].runs[recall.value];
  const found = new Set(run.hits.map((hit) => hit.id));
  const stateOf = (row) => found.has(row.id) ? "found" : row.round !== null ? (row.admitted ? "read" : "mate")
    : row.admitted ? "spared" : "refused";
  byId("words").textContent = run.words;
  drawLists(run);
  drawCandidates(run, stateOf);
  fillTable(run, stateOf);
  drawPages(run);
  byId("hits").replaceChildren();
  for (const hit of run.hits)
    add(byId("hits"), "li", `${hit.distance.toFixed(3)}  ${hit.file}:${hit.line}  ${hit.text.slice(0, 300)}`);
}
const [query, recall] = ["query", "recall"].map(byId);
data.searches.forEach((search, at) => query.add(new Option(search.query, at)));
data.searches[0].runs.forEach((run, at) => recall.add(new Option(run.recall, at)));
recall.value = data.searches[0].runs.findIndex((run) => run.recall === 0.99);
query.onchange = recall.onchange = window.onresize = show;
show();
</script>
</body>
</html>
"""


if __name__ == "__main__":
    main()
