"""Each system needs the packages of its own extra alone, and a missing package is told with its extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from memhier.lazy import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
# Refuses to import packages, as if they were not installed.
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""
OPTIONAL = ("click", "faiss", "rich", "torch", "tqdm", "transformers", "pandas", "scipy", "pyarrow", "h5py", "PIL")


def run(code: str, *packages: str) -> subprocess.CompletedProcess[str]:
    script = HIDE.format(packages=packages) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_a_plain_install_needs_numpy_and_lmdb() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [name.partition(">")[0] for name in project["dependencies"]] == ["numpy", "lmdb"]
    assert {"search", "decoder", "embedding", "cli"} <= set(project["optional-dependencies"])


def test_tiers_and_replay_need_no_extra(tmp_path: Path) -> None:
    code = f"""
import numpy as np
from memhier import Tiered
from memhier.ann import open_vectors, write_vectors
from memhier.recsys import CarouselBuffer
with Tiered({str(tmp_path / "tier")!r}, "rows", np.float32, 4, rows=100, dram="16MiB") as tier:
    tier.scatter([1], np.ones((1, 4), np.float32))
    tier.checkpoint()
    assert tier.gather([1]).sum() == 4
with CarouselBuffer({str(tmp_path / "replay")!r}, memory=4, schema={{"x": ("float32", 2)}}, seed=0) as buffer:
    buffer.add({{"x": np.zeros((8, 2), np.float32)}}, labels=np.zeros(8, int))
    buffer.feedback(buffer.sample(2))
    buffer.checkpoint()
print("done")
"""
    done = run(code, *OPTIONAL)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    ("missing", "name", "extra"),
    [
        ("faiss", "memhier.ann.ZoomIndex", "search"),
        ("tqdm", "memhier.ann.ZoomIndex", "search"),
        ("faiss", "memhier.ann.TopKSoftmax", "search"),
        ("torch", "memhier.ann.TopKSoftmax", "torch"),
        ("torch", "memhier.ann.decoder.TopKSoftmax", "torch"),
        ("torch", "memhier.recsys.EmbeddingBag", "torch"),
        ("torch", "memhier.recsys.lookahead", "torch"),
    ],
)
def test_a_missing_package_is_told_with_its_extra(missing: str, name: str, extra: str) -> None:
    package, _, member = name.rpartition(".")
    done = run(f"from {package} import {member}", missing)
    assert done.returncode != 0
    assert f"needs the package {missing}: pip install 'memhier[{extra}]'" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("missing", [(), ("torch",), ("faiss",), ("torch", "faiss", "tqdm", "transformers")], ids=str)
def test_help_dir_and_completion_show_every_public_name(missing: tuple[str, ...]) -> None:
    code = """
import pydoc, rlcompleter
import memhier, memhier.ann, memhier.recsys
for package in (memhier, memhier.ann, memhier.recsys):
    contents = pydoc.plaintext.document(package).partition("FILE")[0]
    completer, completed = rlcompleter.Completer({"package": package}), []
    while (word := completer.complete("package.", len(completed))) is not None:
        completed.append(word)
    words = {word.removeprefix("package.").rstrip("()") for word in completed}
    for name in package.__all__:
        assert name in dir(package) and hasattr(package, name), name
        assert name in words, name
        assert f"class {name}" in contents or f"    {name}" in contents, name
print("done")
"""
    done = run(code, *missing)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    "use",
    [
        "memhier.ann.TopKSoftmax.from_linear",
        "memhier.recsys.EmbeddingBag(10, 4)",
        "memhier.recsys.lookahead([], None)",
        "type('Mine', (memhier.recsys.EmbeddingBag,), {})",
        "exec('from memhier.recsys import *'); EmbeddingBag(10, 4)",
        "exec('from memhier.ann import *'); TopKSoftmax.from_linear",
    ],
)
def test_a_name_without_its_package_raises_on_use(use: str) -> None:
    done = run(f"import memhier.ann, memhier.recsys\n{use}", "torch")
    assert "pip install 'memhier[torch]'" in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("missing", [(), ("torch",), ("faiss",), ("torch", "faiss", "tqdm", "fsspec", "ray")], ids=str)
@pytest.mark.parametrize("package", ["memhier", "memhier.ann", "memhier.recsys", "memhier.ann.cluster"])
def test_a_star_brings_every_name_whatever_is_missing(package: str, missing: tuple[str, ...]) -> None:
    code = f"""
import {package} as package
from {package} import *
print([name for name in package.__all__ if name not in globals()])
"""
    done = run(code, *missing)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("ann.sklearn", "scipy", "sklearn"),
        ("ann.datasets", "datasets", "datasets"),
        ("ann.langchain", "langchain_core", "langchain"),
        ("ann.llama_index", "llama_index", "llamaindex"),
        ("ann.huggingface", "torch", "torch"),
        ("ann.huggingface", "faiss", "search"),
        ("ann.cluster.index", "ray", "ray"),
        ("recsys.lightning", "lightning", "lightning"),
        ("recsys.lightning", "torch", "torch"),
    ],
)
def test_an_adapter_tells_the_extra_that_brings_its_library(module: str, missing: str, extra: str) -> None:
    done = run(f"import memhier.{module}", missing)
    words = f"needs the package {missing}: pip install 'memhier[{extra}]'"
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: memhier."), done.stderr
    assert words in done.stderr.splitlines()[-1], done.stderr


def test_every_package_told_belongs_to_the_extra_that_is_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {"PIL": "pillow", "faiss": "faiss-cpu", "langchain_core": "langchain-core", "scipy": "scikit-learn"}
    named |= {"prometheus_client": "prometheus-client", "llama_index": "llama-index-core"}
    named |= {"pillow_jxl": "pillow-jxl-plugin"}
    named |= {"sklearn": "scikit-learn"}  # scipy comes with scikit-learn
    for package, extra in EXTRAS.items():
        brought = " ".join(project["optional-dependencies"][extra])
        assert f"{named.get(package, package)}>=" in brought, package


def test_questions_about_a_name_without_its_package_raise_nothing() -> None:
    code = """
import copy, inspect
import memhier.recsys
bag = memhier.recsys.EmbeddingBag
print(isinstance(3, bag), bag | None, inspect.signature(bag), copy.deepcopy(bag) is bag, hasattr(bag, "_repr_html_"))
print("memhier[torch]" in bag.__doc__, bag.__name__, hasattr(memhier.recsys, "Bag"), memhier.recsys.lookahead.__name__)
"""
    done = run(code, "torch")
    assert done.stdout.splitlines() == [
        "False memhier.recsys.EmbeddingBag | None (*args: Any, **options: Any) -> NoReturn True False",
        "True EmbeddingBag False lookahead",
    ], done.stderr


def test_torch_is_needed_by_no_search(tmp_path: Path) -> None:
    code = f"""
import numpy as np
from memhier.ann import ZoomIndex
vectors = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
with ZoomIndex.build({str(tmp_path / "index")!r}, vectors, dram="3MiB") as index:
    print(index.search(vectors[0], k=1).ids.tolist())
"""
    done = run(code, "torch", "click", "rich", "transformers")
    assert done.stdout == "[0]\n", done.stderr
