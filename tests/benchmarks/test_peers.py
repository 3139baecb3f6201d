"""Adapters and the process that runs them: their shape, their charges, and their failures."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memhier.benchmarks.exact import distances_of, exact_neighbours, id_recall, recall_at_k
from memhier.benchmarks.generators import mixed
from memhier.benchmarks.peers import PEERS, account
from memhier.benchmarks.peers.account import PageCache, PeakMemory, Usage
from memhier.benchmarks.peers.base import row_blocks, write_bin
from memhier.benchmarks.peers.process import PeerError, find_python, group_python, install_group, peer_version, run_job
from memhier.benchmarks.peers.worker import make_peer

ADAPTERS = Path(account.__file__).parent


@pytest.mark.parametrize("name", PEERS)
def test_an_adapter_is_short_and_complete(name: str) -> None:
    peer = make_peer(name)
    assert peer.name == name
    assert peer.traps
    assert peer.install
    assert peer.io in ("direct", "buffered", "mapped", "none")
    assert len({tuple(effort.items()) for effort in peer.efforts}) == len(peer.efforts) > 1
    assert len((ADAPTERS / f"{name}.py").read_text().splitlines()) < 120


def test_every_adapter_is_in_the_list() -> None:
    files = {file.stem for file in ADAPTERS.glob("*.py") if "class Peer(" in file.read_text()}
    assert files == set(PEERS)


def test_importing_the_worker_needs_numpy_alone() -> None:
    code = "import sys, memhier.benchmarks.peers.worker; print({'faiss', 'lmdb', 'rich', 'click'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture
def job(tmp_path: Path) -> dict[str, object]:
    data = mixed(1500, 16, seed=3, clusters=8)
    np.save(tmp_path / "base.npy", data.array())
    np.save(tmp_path / "queries.npy", data.queries(7))
    return {
        "vectors": str(tmp_path / "base.npy"),
        "queries": str(tmp_path / "queries.npy"),
        "folder": str(tmp_path / "index"),
        "ids": str(tmp_path / "ids.npz"),
        "dram_bytes": 1 << 20,
        "k": 3,
        "cap_memory": True,
    }


@pytest.mark.parametrize("name", ["faiss_lists", "faiss_refine"])
def test_a_peer_builds_and_searches_in_its_own_process(name: str, job: dict[str, object], tmp_path: Path) -> None:
    peer = make_peer(name)
    python = find_python(peer, tmp_path / "no environments")
    assert peer_version(peer, python)[0].isdigit()
    thorough = {"nprobe": 1000, "k_factor": 500}
    job |= {"peer": name, "parameters": dict(peer.build_parameters), "efforts": [dict(peer.efforts[0]), thorough]}
    built = run_job(python, job | {"action": "build"}, 60)
    assert built["cpu_s"] > 0
    assert built["peak_rss_bytes"] >= built["peak_private_bytes"] > 2**20
    assert built["file_bytes"] >= 1500 * 16 * 4
    found = run_job(python, job | {"action": "search"}, 60)
    assert [row["effort"] for row in found["rows"]] == job["efforts"]
    assert all(row["queries"] == 7 and row["p99_ms"] >= row["p50_ms"] > 0 for row in found["rows"])
    base, queries = np.load(str(job["vectors"])), np.load(str(job["queries"]))
    true_ids, true_distances = exact_neighbours(base, queries, 3)
    with np.load(str(job["ids"])) as ids:
        assert id_recall(ids["1"], true_ids) == 1
        assert recall_at_k(distances_of(base, queries, ids["1"]), true_distances) == 1


def test_a_peer_that_is_not_there_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memhier.benchmarks.peers.process.find_spec", lambda name: None)
    with pytest.raises(PeerError, match=r"diskannpy is not installed: memhier bench install search"):
        find_python(make_peer("diskann"), tmp_path)
    own = tmp_path / "diskannpy" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_python(make_peer("diskann"), tmp_path) == own


@pytest.mark.long
def test_a_group_has_an_environment_that_sees_this_one(tmp_path: Path) -> None:
    assert group_python("replay", tmp_path) == Path(sys.executable)
    rival = tmp_path / "rival"
    rival.mkdir()
    (rival / "pyproject.toml").write_text(
        "[project]\nname = 'rival'\nversion = '1'\ndependencies = ['no-such-package']\n"
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    # A wheel by hand: building a real one would need the network.
    (rival / "backend.py").write_text(
        "import zipfile\n"
        "def build_wheel(folder, *_):\n"
        "    name = 'rival-1-py3-none-any.whl'\n"
        "    info = {'rival.py': 'here = 3', 'rival-1.dist-info/METADATA': 'Metadata-Version: 2.1\\nName: rival\\n"
        "Version: 1\\nRequires-Dist: no-such-package\\n', 'rival-1.dist-info/WHEEL': 'Wheel-Version: 1.0\\n"
        "Generator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n', 'rival-1.dist-info/RECORD': ''}\n"
        "    with zipfile.ZipFile(f'{folder}/{name}', 'w') as file:\n"
        "        [file.writestr(path, text) for path, text in info.items()]\n"
        "    return name\n"
    )
    python = install_group("replay", [str(rival)], tmp_path)
    assert group_python("replay", tmp_path) == python
    code = "import rival, numpy, memhier; print(rival.here, numpy.__version__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["3", np.__version__]
    with pytest.raises(PeerError, match=r"pip install --no-deps .*nothing_here"):
        install_group("replay", [str(tmp_path / "nothing_here")], tmp_path)


def test_a_peer_that_breaks_is_an_error_with_its_last_words(job: dict[str, object]) -> None:
    job |= {"peer": "faiss_lists", "parameters": {}, "action": "search", "efforts": []}
    with pytest.raises(PeerError, match=r"faiss_lists: search ended with 1: .*Error.*index\.faiss") as told:
        run_job(Path(sys.executable), job, 60)
    assert "Traceback" not in str(told.value)
    with pytest.raises(PeerError, match="took longer than 0 s"):
        run_job(Path(sys.executable), job, 0.001)


def test_pages_in_the_cache_are_seen_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(os.urandom(40_000))
    (tmp_path / "empty").touch()
    cache = PageCache(tmp_path)
    assert cache.resident_bytes() == 40_960
    monkeypatch.setattr(account, "_CACHESTAT", 100_000)  # no such call: the way of an older kernel
    assert cache.resident_bytes() == 40_960
    mapped = np.memmap(tmp_path / "deep" / "file", np.uint8, "r")
    assert int(mapped[0]) + int(mapped[-1]) >= 0
    before = Usage.now()
    cache.drop()
    assert cache.resident_bytes() == 0
    first = mapped.tobytes()
    assert (Usage.now() - before).read_bytes >= 40_000
    assert first == (tmp_path / "deep" / "file").read_bytes()


def test_a_peak_between_two_moments_is_seen() -> None:
    with PeakMemory() as quiet:
        pass
    with PeakMemory() as peak:
        before = Usage.now()
        while peak.private_bytes < quiet.private_bytes + 60 * 2**20 and (Usage.now() - before).wall_s < 20:
            # A map of its own, as the heap may reuse what earlier tests left it.
            np.frombuffer(mmap.mmap(-1, 64 * 2**20), np.uint8)[:] = 1
    assert peak.private_bytes > quiet.private_bytes + 60 * 2**20
    assert (Usage.now() - before).cpu_s > 0


def test_memory_is_capped() -> None:
    code = (
        "import numpy as np\nfrom memhier.benchmarks.peers.account import cap_memory\ncap_memory(32 << 20)\n"
        "np.ones(1 << 20)\n"
        "try:\n    np.ones(16 << 20)\nexcept MemoryError:\n    print('capped')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "capped"


def test_answers_that_repeat_or_miss_do_not_count() -> None:
    base = np.arange(5, dtype=np.uint8)[:, None]
    queries = np.zeros((1, 1), np.uint8)
    found = distances_of(base, queries, np.array([[0, 0, -1, 7]]))
    assert found.tolist() == [[0, np.inf, np.inf, np.inf]]
    assert id_recall(np.array([[0, 0, -1]]), np.array([[0, 1, 2]])) == pytest.approx(1 / 3)


def test_bin_files_are_as_described(tmp_path: Path) -> None:
    vectors = np.arange(70_000 * 3, dtype=np.uint8).reshape(-1, 3)
    write_bin(vectors[::2], tmp_path / "vectors.u8bin")
    raw = (tmp_path / "vectors.u8bin").read_bytes()
    assert np.frombuffer(raw, np.uint32, 2).tolist() == [35_000, 3]
    assert raw[8:] == vectors[::2].tobytes()
    assert sum(len(block) for block in row_blocks(vectors)) == 70_000
