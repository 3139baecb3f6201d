"""The mounts of this machine."""

from pathlib import Path

__all__ = ["IN_MEMORY", "mount_of"]

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def mount_of(path: Path) -> tuple[str, str]:
    """Return type and source of the mount that `path` lies on."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return "unknown", "unknown"
    real = path.resolve()
    best, depth = ("unknown", "unknown"), -1
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(_unescape(before.split()[4]))
        # A later mount on the same point hides the earlier one.
        if (real == point or point in real.parents) and len(point.parts) >= depth:
            kind, source = after.split()[:2]
            best, depth = (kind, _unescape(source)), len(point.parts)
    return best


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
