"""Print the requirements of memhier with an extra, the extras that it names included, one a line."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["requirements"]

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> Iterator[str]:
    """Yield the packages of an extra, each with its least version."""
    for entry in PROJECT["optional-dependencies"][extra]:
        named = re.fullmatch(r"memhier\[(.*)\]", entry)
        if named is None:
            yield entry
        else:
            for part in named[1].split(","):
                yield from requirements(part)


if __name__ == "__main__":
    print(*sorted({*PROJECT["dependencies"], *requirements(sys.argv[1])}), sep="\n")
