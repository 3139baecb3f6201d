"""Each system needs the packages of its own extra alone, and a missing package is told with its extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
