"""The description of a transition buffer in its catalog, and its checks: nothing decoded is believed."""

from typing import Any

from memhier.errors import CorruptionError, FormatError
from memhier.fields import boolean, decode_json, described, integer, optional, real, record, row, sequence, text
from memhier.recsys.replay.transitions.draws import decoded_draw, encoded_draw
from memhier.recsys.replay.transitions.layout import Layout
from memhier.recsys.replay.transitions.runs import decoded_runs, encoded_runs
from memhier.recsys.replay.transitions.settings import TransitionSettings
from memhier.store.store import Store

__all__ = ["KIND", "META", "VERSION", "decode_meta", "decoded_settings", "encoded_settings"]

KIND = "transitions"
META = "transitions/meta"
VERSION = 1


def _anything(value: Any) -> None:
    """Accept a value that its class checks."""


_COUNT = integer(0, 2**60)
_CHECK = record({
    "version": integer(),
    "fields": sequence(row(text(), text(), sequence(integer(0, 2**40))), 1),
    "capacity": integer(1, 2**31),
    "draw": _anything,
    "runs": _anything,
    "batch": integer(1, 2**31),
    "ahead": integer(0, 2**20),
    "ends": sequence(text()),
    "seed": integer(0, 2**63 - 1),
    "stop": _COUNT,
    "parts": sequence(row(_COUNT, integer(1, 2**60))),
    "uniforms": _COUNT,
    "largest": real(0),
    "open_steps": _COUNT,
    "waiting": sequence(integer(1, 2**31)),
    "value": optional(text()),
})  # fmt: skip
_DRAW = {
    "uniform": record({"kind": text(), "replace": boolean}),
    "prioritised": record({"kind": text(), "alpha": real(0), "beta": real(0), "epsilon": real(0)}),
}
_RUNS = {
    "nstep": record({
        "kind": text(), "steps": integer(1), "discount": real(0, 1), "reward": optional(text()),
        "last": optional(sequence(text())),
    }),
    "slices": record({"kind": text(), "length": integer(1), "padded": boolean}),
}  # fmt: skip


def encoded_settings(settings: TransitionSettings) -> dict[str, Any]:
    """Return the settings, for JSON."""
    return {
        "version": VERSION,
        "fields": settings.layout.encode(),
        "capacity": settings.capacity,
        "draw": encoded_draw(settings.draw),
        "runs": encoded_runs(settings.runs),
        "batch": settings.batch,
        "ahead": settings.ahead,
        "ends": list(settings.ends),
        "seed": settings.seed,
    }


def decoded_settings(where: object, meta: dict[str, Any]) -> TransitionSettings:
    """Return the settings of a description, or raise CorruptionError."""
    with described(where):
        return TransitionSettings(
            Layout.decode(meta["fields"]), meta["capacity"], decoded_draw(meta["draw"]), decoded_runs(meta["runs"]),
            meta["batch"], meta["ahead"], tuple(meta["ends"]), meta["seed"],
        )  # fmt: skip


def decode_meta(store: Store) -> dict[str, Any]:
    """Return the description of a buffer.

    Raises
    ------
    FormatError, CorruptionError
        If there is none, it is of another version, or is damaged.
    """
    where, raw = f"{store.path}: the value {META!r}", store.get(META)
    if raw is None:
        raise FormatError(f"{store.path}: the store has no description of a transition buffer")
    version = decode_json(raw, where, record({"version": integer()}))["version"]
    if version != VERSION:
        raise FormatError(f"{store.path}: holds a transition buffer of version {version}, expected {VERSION}")
    meta: dict[str, Any] = decode_json(raw, where, _CHECK)
    for name, checks in (("draw", _DRAW), ("runs", _RUNS)):
        if name == "runs" and meta[name] is None:
            continue
        kind = meta[name].get("kind") if isinstance(meta[name], dict) else None
        if kind not in checks:
            raise CorruptionError(f"{where}: {name}={meta[name]!r} is none of {sorted(checks)}")
        decode_json(raw, where, record({name: checks[kind]}))
    parts, segments = meta["parts"], store.segments()
    for index, (start, count) in enumerate(parts):
        if index and sum(parts[index - 1]) != start:
            raise CorruptionError(f"{where}: part {index} begins at {start}, expected {sum(parts[index - 1])}")
        if f"rows-{start}" not in segments:
            raise CorruptionError(f"{where}: the segment rows-{start} is not there, with {count} transitions")
    oldest = max(0, meta["stop"] - meta["capacity"])
    if meta["stop"] and (not parts or sum(parts[-1]) != meta["stop"] or parts[0][0] > oldest):
        raise CorruptionError(f"{where}: parts {parts} do not hold the transitions {oldest} to {meta['stop']}")
    return meta
