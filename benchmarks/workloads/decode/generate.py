"""Writing with the decoder and without: tokens a second of models trained on the spot, and the share of the head.

``python -m memhier.benchmarks.workloads.decode.generate`` trains an LSTM and a GPT on Brown and Penn
Treebank, a vocabulary of more than 50,000 words, and lets each write greedily with one thread, batch 1.
Seconds are of processor time, which neighbours disturb little.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import click
import numpy as np
import torch
from torch import Tensor

from memhier.ann.decoder import TopKSoftmax
from memhier.ann.decoder.module.huggingface import accelerate
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.models.text import read_words
from memhier.benchmarks.models.train import LstmModel, gpt_model, train
from memhier.benchmarks.workloads.harness import Outcome, Row, bars_of, by_turns, rows_table, workload

__all__ = ["main"]

_CONTEXTS = 6000
_ROUNDS = 5


def states_of(model: LstmModel, tokens: Any, count: int) -> Tensor:
    """Return real hidden states, from the start of the text."""
    pieces = torch.from_numpy(tokens[: count // 60 * 60].reshape(-1, 60))
    hidden: Tensor = model(pieces)[0]
    return hidden.reshape(-1, hidden.shape[-1])


def write_lstm(model: LstmModel, choose: Callable[[Tensor], Tensor], length: int) -> tuple[list[int], float, float]:
    """Return the words that the model writes, and seconds: of all, and of choosing."""
    word, state, text, chosen_s = torch.tensor([[7]]), None, [], 0.0
    started = time.thread_time()
    for _ in range(length):
        hidden, state = model(word, state)
        before = time.thread_time()
        word = choose(hidden[:, -1]).reshape(1, 1)
        chosen_s += time.thread_time() - before
        text.append(int(word))
    return text, time.thread_time() - started, chosen_s


def measure_lstm(tokens: Any, words: int, steps: int, length: int) -> dict[str, Any]:
    """Train, build, and write by turns."""
    model = LstmModel(words)
    losses = train(model, tokens, words, steps)
    model.requires_grad_(False)
    started = time.thread_time()
    decoder = TopKSoftmax.from_linear(model.head, k=10, contexts=states_of(model, tokens[50_000:], _CONTEXTS))
    build_s = time.thread_time() - started
    asked = states_of(model, tokens[-3000:], 1200)
    truth = torch.topk(model.head(asked), 10).indices
    found = decoder.topk(asked)[1]
    shared = (found[:, :, None] == truth[:, None, :]).any(2).float().mean()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "full": lambda hidden: model.head(hidden).argmax(-1),
        "decoder": lambda hidden: decoder.topk(hidden, 1)[1],
        "certified": lambda hidden: decoder.certified_topk(hidden, 1)[1],
    }
    runs = by_turns({name: partial(write_lstm, model, choose, length) for name, choose in ways.items()}, _ROUNDS)
    return {"model": "LSTM", "build_s": build_s, "precision": float(shared)} | _summary(runs, losses, length)


def _summary(runs: dict[str, list[Any]], losses: list[float], length: int) -> Row:
    return {
        "loss_first": losses[0], "loss_last": float(np.mean(losses[-20:])),
        "identical": float(np.mean(np.array(runs["certified"][0][0]) == runs["full"][0][0])),
        "tokens_s": {name: [length / run[1] for run in found] for name, found in runs.items()},
        "share_of_head": {name: float(np.median([run[2] / run[1] for run in found])) for name, found in runs.items()},
    }  # fmt: skip


def measure_gpt(tokens: Any, words: int, steps: int, length: int) -> dict[str, Any]:
    """Train, and let ``generate`` of transformers write with the layer, the decoder, and the decoder certified."""
    model = gpt_model(words)
    losses = train(model, tokens, words, steps)
    prompt = torch.from_numpy(tokens[:8])[None]

    def write(model: Any) -> tuple[list[int], float, float]:
        with HeadClock(model.get_output_embeddings()) as clock:
            started = time.thread_time()
            text = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            return text[0, 8:].tolist(), time.thread_time() - started, clock.seconds

    text = torch.from_numpy(tokens[50_000 : 50_000 + _CONTEXTS].reshape(-1, 60))
    models, build_s = {"full": model}, {}
    for name, certify in (("decoder", False), ("certified", True)):
        started = time.thread_time()
        models[name] = accelerate(copy.deepcopy(model), k=64, input_ids=text, certify=certify)
        build_s[name] = time.thread_time() - started
    runs = by_turns({name: partial(write, each) for name, each in models.items()}, _ROUNDS + 1)
    runs = {name: found[1:] for name, found in runs.items()}
    return {"model": "GPT", "build_s": build_s["decoder"]} | _summary(runs, losses, length)


class HeadClock:
    """Adds up the seconds of processor time that an output layer takes, while it is open."""

    def __init__(self, head: torch.nn.Module) -> None:
        self.seconds, self._since = 0.0, 0.0
        self._hooks = [head.register_forward_pre_hook(self._start), head.register_forward_hook(self._stop)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _start(self, *_: object) -> None:
        self._since = time.thread_time()

    def _stop(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._since


@workload
@click.option("--steps", default=1500, show_default=True, help="Of training, for each model.")
@click.option("--length", default=200, show_default=True, help="Words to write in a round.")
def main(steps: int, length: int) -> Outcome:
    """Measure tokens a second of models trained on the spot."""
    tokens, words = read_words()
    rows = [measure_lstm(tokens, words, steps, length), measure_gpt(tokens, words, steps, min(length, 120))]
    figures, bars = [], []
    for row in rows:
        model, speed = row["model"], row["tokens_s"]
        for name in ("decoder", "certified"):
            ratio = float(np.median(speed[name]) / np.median(speed["full"]))
            figures.append(Figure.of(f"writing of {model}, {name} over full", ratio, "times", "more", clock=True))
        figures.append(Figure.of(f"{model}, certified words that are its own", row["identical"], "share", "more"))
        bars.append(bars_of(f"writing of {model}, batch 1", "tokens/s", speed))
    figures.append(Figure.of("P@10, LSTM trained on the spot", rows[0]["precision"], "share", "more"))
    heads = [{"model": row["model"]} | row["share_of_head"] for row in rows]
    shown = [rows_table("share of the output layer in the time of writing", heads)]
    return Outcome(Record(figures, bars=bars, scale=f"{words:,} words, one thread"), shown, {"models": rows})


if __name__ == "__main__":
    main()
