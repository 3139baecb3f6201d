"""Words a second that a language model writes, with its full output layer and with a decoder in its place.

``python -m memhier.benchmarks.workloads.decode.language.generation`` trains a small GPT-2 with 50,000 words on the
Brown corpus and WikiText-2, or on the lines of ``--text``, and keeps it in ``--work``; a training that was cut short
goes on. Then ``generate`` of transformers writes from held-out beginnings, by the model as it is and accelerated, by
turns. Times are processor time of one thread, for whole calls, and apart for the model's body and for all that comes
after it: the output layer, processors and the choice of a word. ``--idle-layers`` adds layers that cost their time but
change nothing, as the share of an output layer falls with the size of the body. Greedy and beam texts are compared;
draws are not, as both take other random numbers. The last table has the output layer alone, for the same hidden states.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from memhier.ann.huggingface import accelerate
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.peers.process import default_environments
from memhier.benchmarks.workloads.decode.clock import Way, measure
from memhier.benchmarks.workloads.decode.language.text import Text, brown_and_wikitext, given_text, made_text
from memhier.benchmarks.workloads.decode.language.writer import Shape, Writer, train_writer, with_idle_layers
from memhier.benchmarks.workloads.decode.translator.sentences import Vocabulary
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload

__all__ = ["main"]

_LEARNED = (64, 96)  # texts and their words, that the decoder learns from
_PROMPT = 32
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ALONE = "output layer alone"

RATES = [
    Measure("words_s", "words a second", "words/s", "more", clock=True),
    Measure("times", "speed-up end to end", "times", "more", clock=True),
]
SAME = Measure("same", "texts as the full layer writes them", "share", "more")


@dataclass(frozen=True, slots=True)
class Call:
    """One way to call ``generate``: its options, and how many texts at a time."""

    name: str
    options: dict[str, Any]
    texts: int = 1


CALLS = (
    Call("greedy", {"do_sample": False}),
    Call("4 beams", {"do_sample": False, "num_beams": 4}),
    Call("top-p 0.9", {"do_sample": True, "top_k": 0, "top_p": 0.9}),
    Call("greedy, 8 texts", {"do_sample": False}, 8),
)


class BodyClock:
    """Adds up the processor time of a model's body."""

    def __init__(self, body: nn.Module) -> None:
        self.seconds: float = 0.0
        self._started = 0.0
        body.register_forward_pre_hook(self._start)
        body.register_forward_hook(self._stop)

    def _start(self, *_: object) -> None:
        self._started = time.thread_time()

    def _stop(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._started


def beginnings(text: Text, vocabulary: Vocabulary, prompts: int) -> tuple[Tensor, Tensor]:
    """Return texts to learn from, int64 ``[n, t]``, and others to begin with, ``[prompts, 32]``: both held out."""
    words = [word for line in text.held_out for word in vocabulary.encode(line)]
    most = min(_LEARNED[0], (len(words) - prompts * _PROMPT) // _LEARNED[1])
    if most < 1:
        raise click.ClickException(f"{text.name}: too few words are held out for {prompts} prompts")
    cut = most * _LEARNED[1]
    learned = torch.tensor(words[:cut]).reshape(most, -1)
    return learned, torch.tensor(words[cut : cut + prompts * _PROMPT]).reshape(prompts, _PROMPT)


def written(model: Any, clock: BodyClock, call: Call, prompt: Tensor, words: int) -> tuple[Tensor, float, float]:
    """Return the texts, and seconds of the whole call and of the model's body."""
    torch.manual_seed(0)
    before, started = clock.seconds, time.thread_time()
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=words, **call.options)
    return found, time.thread_time() - started, clock.seconds - before


def _parts(rows: Tensor, size: int) -> list[Tensor]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def rows_of(plain: Any, fast: Any, call: Call, prompts: Tensor, words: int) -> list[Row]:
    """Let both models write from all prompts, by turns; return a row of each."""
    clocks = {name: BodyClock(model.transformer) for name, model in (("full", plain), ("accelerated", fast))}
    models = {"full": plain, "accelerated": fast}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    same: list[bool] = []
    before = fast.get_output_embeddings().stats()
    for number, prompt in enumerate((prompts[: call.texts], *_parts(prompts, call.texts))):  # the first one warms up
        texts = []
        for name, model in models.items():
            found, whole, body = written(model, clocks[name], call, prompt, words if number else 4)
            texts.append(found)
            if number:
                made = words * len(prompt)
                taken[name].append((1e3 * whole / made, 1e3 * body / made))
        if number:
            same += (texts[0] == texts[1]).all(1).tolist()
    after = fast.get_output_embeddings().stats()
    in_full = (
        sum(after["full_layer"].values())
        + after["completed"]
        - sum(before["full_layer"].values())
        - before["completed"]
    )
    rows: list[Row] = []
    for name, each in taken.items():
        whole, body = (float(np.median(part)) for part in zip(*each, strict=True))
        rows.append({
            "call": call.name, "layer": name, "words_s": 1e3 / whole, "times": 1.0, "ms": whole, "body_ms": body,
            "rest_ms": whole - body, "same": 1.0, "in_full": 1.0,
        })  # fmt: skip
    full, ours = rows
    ours["times"] = full["ms"] / ours["ms"]
    ours["same"] = float("nan") if call.options["do_sample"] else float(np.mean(same))
    ours["in_full"] = in_full / max(1, after["rows"] - before["rows"])
    return rows


@torch.no_grad()
def alone(plain: Any, fast: Any, prompts: Tensor, rounds: int) -> list[Row]:
    """Measure the output layer alone, cold and warm, one state at a time."""
    states = plain.transformer(prompts).last_hidden_state.flatten(0, 1).float().numpy()
    head, decoder = plain.lm_head, fast.get_output_embeddings().decoder
    kind = head.weight.dtype

    def full(some: Any) -> Any:
        return head(torch.from_numpy(some).to(kind)).argmax(-1).numpy()

    ways = [
        Way("full", "", full),
        Way("decoder", "", lambda some: decoder.topk(torch.from_numpy(some), 1)[1].numpy()),
        Way("decoder, certified", "", lambda some: decoder.certified_topk(torch.from_numpy(some), 1)[1].numpy()),
    ]
    cold, warm = measure(ways, states, 1, rounds).medians()
    return [
        {"way": way.name, "ms": cold[way.name], "times": cold["full"] / cold[way.name],
         "ms_warm": warm[way.name], "times_warm": warm["full"] / warm[way.name]}
        for way in ways
    ]  # fmt: skip


def models_of(writer: Writer, kind: str, idle: int, learned: Tensor, precision: float) -> tuple[Any, Any, float]:
    """Return the model as it is, an accelerated copy, and seconds of the decoder's build."""
    plain, fast = (nn.Module.to(with_idle_layers(writer, idle), _TYPES[kind]) for _ in range(2))
    started = time.process_time()
    accelerate(fast, input_ids=learned, precision=precision, certify=True)
    return plain, fast, time.process_time() - started


@workload
@click.option(
    "--text", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Lines to learn from."
)
@click.option("--made", type=click.IntRange(100), help="So many lines of a made language instead.")
@click.option("--words", default=Shape().words, show_default=True, help="The most of the vocabulary.")
@click.option("--width", default=Shape().width, show_default=True)
@click.option("--layers", default=Shape().layers, show_default=True)
@click.option("--steps", default=Shape().steps, show_default=True, help="Of the training.")
@click.option("--idle-layers", "idle", type=int, multiple=True, default=(0, 8), show_default=True)
@click.option("--type", "kind", type=click.Choice(sorted(_TYPES)), default="fp32", show_default=True)
@click.option("--precision", default=0.99, show_default=True)
@click.option("--prompts", default=16, show_default=True)
@click.option("--length", default=48, show_default=True, help="Words to write for each.")
@click.option("--rounds", default=40, show_default=True, help="Of the output layer alone.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="A folder that keeps the trained model.")
def main(
    *, path: Path | None, made: int | None, words: int, width: int, layers: int, steps: int, idle: tuple[int, ...],
    kind: str, precision: float, prompts: int, length: int, rounds: int, work: Path | None,
) -> Outcome:  # fmt: skip
    """Compare a model that writes with its full layer and with a decoder."""
    text = made_text(made, max(20, made // 10)) if made else given_text(path) if path else brown_and_wikitext()
    shape = Shape(words=words, width=width, layers=layers, steps=steps)
    writer = train_writer(text, shape, work or default_environments().parent / "bench" / "decode")
    learned, asked = beginnings(text, writer.vocabulary, prompts)
    rows: list[Row] = []
    heads: list[Row] = []
    for more in idle:
        plain, fast, seconds = models_of(writer, kind, more, learned, precision)
        body = f"{layers} + {more} layers" if more else f"{layers} layers"
        for call in CALLS:
            rows += [{"body": body} | row for row in rows_of(plain, fast, call, asked, length)]
        if not heads:
            heads = [row | {"build_s": seconds} for row in alone(plain, fast, asked, rounds)]
    count = len(writer.vocabulary)
    title = f"GPT-2 of {count:,} words x {width}, {kind}"
    told = (
        f"{text.name}: {title}; {steps} steps of 1,024 words in {writer.seconds:,.0f} s of processor time, "
        f"loss {writer.loss:.2f}"
    )
    ours = [row for row in rows if row["layer"] == "accelerated"]
    figures = [
        *figures_of(rows, RATES[:1], "{title}, {body}, {call}, {layer}"),
        *figures_of(ours, RATES[1:], "{title}, {body}, {call}"),
        *figures_of([row for row in ours if row["same"] == row["same"]], [SAME], "{title}, {body}, {call}"),
        *figures_of(
            heads, [Measure("times", "speed-up, cold", "times", "more", clock=True)], _ALONE + ", {way}: {title}"
        ),
    ]
    shown: list[Table | str] = [
        told, rows_table("end to end: ms of a word", rows), rows_table(f"{_ALONE}, one state: cold and warm", heads),
    ]  # fmt: skip
    return Outcome(Record(figures, [], scale=f"{title}, one thread of a CPU"), shown, {"rows": rows, "alone": heads})


if __name__ == "__main__":
    main()
