"""The run of transformers' generation tests, on a stand-in for their sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SOURCE = """
import pytest
import torch
import transformers
from types import SimpleNamespace


class GenerationTesterMixin:
    pass


class TestTiny(GenerationTesterMixin):
    model_tester = SimpleNamespace(vocab_size=99)

    def model(self):
        config = transformers.GPT2Config(
            vocab_size=self.model_tester.vocab_size, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).eval()

    @pytest.mark.generate
    def test_greedy(self):
        model = self.model()
        assert type(model.get_output_embeddings()).__name__ == "AcceleratedHead"
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False, pad_token_id=0)

    @pytest.mark.generate
    def test_that_is_wrong(self):
        assert self.model().get_output_embeddings().weight.shape[0] == 99

    @pytest.mark.generate
    def test_inherits_generation_mixin(self):
        raise AssertionError

    def test_of_something_else(self):
        raise AssertionError
"""


@pytest.mark.slow
def test_models_are_accelerated_and_failures_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "test_modeling_tiny.py").write_text(SOURCE)
    command = [sys.executable, "-m", "memhier.benchmarks.suites.transformers_tests", str(tmp_path), "--model", "tiny"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_that_is_wrong" in done.stdout
    assert "left out: 1 test" in done.stdout
    assert "3 hidden states" in done.stdout
    assert done.returncode == 1
