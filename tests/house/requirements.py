"""Print the requirements of an extra of pyproject.toml, the extras that it names included, one a line."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["requirements"]

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def requirements(extra: str) -> Iterator[str]:
    """Yield the packages of an extra, each with its least version."""
    for entry in tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]:
        named = re.fullmatch(r"memhier\[(.*)\]", entry)
        if named is None:
            yield entry
        else:
            for part in named[1].split(","):
                yield from requirements(part)


if __name__ == "__main__":
    print(*sorted({*requirements(sys.argv[1])}), sep="\n")
