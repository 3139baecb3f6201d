"""DRAM budgets: ``"64MiB"``, ``"2GB"`` or a number of bytes."""

import re

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, name: str = "dram") -> int:
    """Return a size in bytes.

    Parameters
    ----------
    value
        An integer number of bytes, or text such as ``"512MiB"`` (powers of 1024) or ``"2GB"`` (powers of 1000).
    name
        Name of the argument, for errors.

    Raises
    ------
    TypeError
        When `value` is neither an integer nor text.
    ValueError
        When the text cannot be read as a size, or the size is not positive.

    Examples
    --------
    >>> from memhier import parse_bytes
    >>> parse_bytes("64MiB"), parse_bytes("2 GB"), parse_bytes(4096)
    (67108864, 2000000000, 4096)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name}={value!r}: expected bytes as an int, or text such as '64MiB' or '2GB'")
    if isinstance(value, int):
        size = value
    else:
        match = _PATTERN.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{name}={value!r}: expected a size such as '64MiB', '2GB' or a number of bytes")
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ValueError(f"{name}={value!r}: expected a positive size")
    return size


def format_bytes(size: float) -> str:
    """Return a size as short text in powers of 1024.

    Examples
    --------
    >>> from memhier import format_bytes
    >>> format_bytes(512), format_bytes(65 * 2**20)
    ('512 B', '65.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
