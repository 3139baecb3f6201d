"""The README's Python blocks run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.timeout(1800)  # four systems, one after the other
def test_python_blocks_run_as_printed(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    run = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "bytes of DRAM a vector" in run.stdout
    assert (tmp_path / "topics.index").is_dir()


def test_no_figure_is_left_to_fill_in():
    assert re.search(r"@[A-Z]+@|TODO|TBD", README.read_text()) is None
