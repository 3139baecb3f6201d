"""The generation tests of transformers, with :func:`accelerate` applied to every model under test.

``python -m memhier.benchmarks.suites.transformers_tests FOLDER`` runs them by pytest from FOLDER, a checkout of
transformers of about the installed version; ``pip install parameterized httpx`` adds the packages that they import. A
model is accelerated where a test calls ``eval()``. The vocabulary has some hundred words in the place of 99, so that
the decoder has words to leave out, and the decoder answers by its codes, which are faster only for large layers. The
last lines tell how many hidden states it answered, and how many took the full layer.
"""

import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import click

__all__ = ["LEFT_OUT", "Accelerating", "main"]

MODELS = ("gpt2", "bart", "t5")
WORDS, K = 400, 32
LEFT_OUT = {
    "test_inherits_generation_mixin": "of the class, without a model",
    "fa2_generate": "for a GPU",
    "flash_attention": "for a GPU",
}


class Accelerating:
    """A plugin of pytest that accelerates models.

    Parameters
    ----------
    words
        The vocabulary of models under test.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._accelerates = False
        self.heads: list[Any] = []
        self.left_out: list[str] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave tests out."""
        kept: list[Any] = []
        for item in items:
            if item.get_closest_marker("generate") is None or not _is_of_mixin(item):
                continue
            (self.left_out if any(name in item.name for name in LEFT_OUT) else kept).append(item)
        items[:] = kept

    def pytest_runtest_call(self, item: Any) -> None:
        """Give the models of a test another vocabulary."""
        tester: Any = getattr(item.instance, "model_tester", None)
        if hasattr(tester, "vocab_size"):
            tester.vocab_size = self._words

    def install(self) -> None:
        """Let ``eval()`` of models accelerate them from now on."""
        transformers: Any = import_module("transformers")

        from memhier.ann.huggingface import accelerate

        plain = transformers.PreTrainedModel.eval

        def eval_fast(model: Any) -> Any:
            model = plain(model)
            if not self._accelerates and _is_plain(model):
                self._accelerates = True
                try:
                    accelerate(model, k=K, method="preview", certify=True)
                finally:
                    self._accelerates = False
                self.heads.append(model.get_output_embeddings())
            return model

        transformers.PreTrainedModel.eval = eval_fast

    def figures(self) -> dict[str, int]:
        """Return hidden states that the heads answered, by how."""
        total: Counter[str] = Counter()
        for head in self.heads:
            stats = head.stats()
            full = stats["full_layer"]
            total += Counter({f"full layer, {reason}": rows for reason, rows in full.items()})
            total["not proven, in full"] += stats["completed"]
            total["by the decoder"] += stats["rows"] - sum(full.values()) - stats["completed"]
        return dict(total)


def _is_of_mixin(item: Any) -> bool:
    return any(each.__name__ == "GenerationTesterMixin" for each in getattr(item.cls, "__mro__", ()))


def _is_plain(model: Any) -> bool:
    """Say if a model writes text by an output layer that is not accelerated."""
    import torch

    return model.can_generate() and type(model.get_output_embeddings()) is torch.nn.Linear


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", "models", multiple=True, default=MODELS, show_default=True, help="Folders of tests/models.")
@click.option("--words", type=click.IntRange(2), default=WORDS, show_default=True, help="The models' vocabulary.")
@click.option("--plain", is_flag=True, help="Accelerate nothing: tests that fail then say nothing of the decoder.")
@click.option("--only", help="Tests with this in their names, as pytest's -k.")
def main(folder: Path, models: tuple[str, ...], words: int, plain: bool, only: str | None) -> None:
    """Run the generation tests in FOLDER, a checkout of transformers, with accelerated models."""
    import pytest

    plugin = Accelerating(words)
    if not plain:
        plugin.install()
    sys.path.insert(0, str(folder))
    places = [str(folder / "tests" / "models" / name) for name in models]
    options = [
        "-q",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        *(["-k", only] if only else []),
    ]
    code = pytest.main([*options, *places], plugins=[plugin])
    click.echo(f"left out: {len(plugin.left_out)} tests")
    for how, rows in sorted(plugin.figures().items()):
        click.echo(f"{rows:,} hidden states {how}")
    sys.exit(int(code))


if __name__ == "__main__":
    main()
