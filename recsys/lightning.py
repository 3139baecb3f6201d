"""Checkpoints of Lightning that fit the tables and buffers on SSD, after a kill at any moment (extra ``lightning``).

Examples
--------
>>> import tempfile
>>> from lightning.pytorch import Trainer
>>> from memhier.recsys import EmbeddingBag
>>> from memhier.recsys.lightning import MemhierCheckpointIO
>>> table = EmbeddingBag(1000, 8, mode="sum", dram="16MiB", path=tempfile.mkdtemp() + "/table", resume=False)
>>> checkpoints = MemhierCheckpointIO(table)
>>> trainer = Trainer(plugins=[checkpoints], logger=False, enable_progress_bar=False, enable_model_summary=False)
>>> checkpoints.latest() is None  # trainer.fit(model, ckpt_path=checkpoints.latest())
True
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memhier.lazy import extra_for

with extra_for(__name__):
    import torch
    import torch.distributed as dist
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    from memhier.recsys.embedding.module import TableModule
    from memhier.recsys.replay import CarouselBuffer

__all__ = ["MemhierCheckpointIO"]

_NAME = "lightning"
_NEW = ".new"


class MemhierCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint of the model together with one of the tables, or of the buffer, that it trains with.

    Give it to the trainer, ``Trainer(plugins=[MemhierCheckpointIO(table)])``. Start, and start again, with tables that
    resume, or an opened buffer, and ``trainer.fit(model, ckpt_path=checkpoints.latest())``. Each checkpoint that
    Lightning takes is one of the tables as well: the file is written under another name, then the tables commit, with
    the number of the file, then the file gets its name. A kill between leaves a file and tables that fit;
    :meth:`latest` finds the file.

    The tables on SSD are those of the newest checkpoint. An older file is refused when it is loaded. Files may lie on a
    local disk only. A training has one rank: Lightning writes checkpoints on rank 0 alone, and would leave the tables
    of the others behind. With several ranks, call the `checkpoint` of the tables on each.

    Parameters
    ----------
    store
        A module of tables (a collection holds any number of them in one commit), which may be part of the model, or a
        replay buffer. With its ``extra``, or its value ``"lightning"``, it notes the number and the file. It is one
        store, as two do not commit in one step.

    Raises
    ------
    TypeError
        For any other store, such as a list of several.
    """

    def __init__(self, store: TableModule | CarouselBuffer) -> None:
        if not isinstance(store, TableModule | CarouselBuffer):
            raise TypeError(
                f"store={type(store).__name__}: expected a module of tables or a replay buffer; several tables belong "
                f"into one EmbeddingBagCollection, which commits in one step"
            )
        self._store = store

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint of the model, and one of the tables or the buffer.

        Raises
        ------
        NotImplementedError
            When the training has several ranks.
        """
        if (ranks := dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1) > 1:
            raise NotImplementedError(
                f"MemhierCheckpointIO: {ranks} ranks, expected 1, as Lightning saves on rank 0 alone: leave it out, "
                f"and call checkpoint() of the tables on every rank"
            )
        place = Path(path).absolute()
        number = self._noted()[0] + 1
        pointers = _pointers(self._store)
        model = dict(checkpoint.get("state_dict", {}))
        names = {name: own for name, value in model.items() for own in pointers if _same(value, pointers[own])}
        kept = {name: value for name, value in model.items() if name not in names}
        made = checkpoint | {"state_dict": kept, "memhier": {"number": number, "names": names}}
        unfinished = place.with_name(place.name + _NEW)
        try:
            super().save_checkpoint(made, str(unfinished), storage_options)
            _sync(unfinished)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self._commit({"number": number, "path": str(place)})
        os.replace(unfinished, place)
        _sync(place.parent)

    def load_checkpoint(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint of the model.

        Raises
        ------
        ValueError
            When the tables or the buffer are not those of this checkpoint.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(str(path), *arguments, **options)
        number, newest = self._noted()
        about = checkpoint.pop("memhier", {"number": None, "names": {}})
        if about["number"] != number:
            raise ValueError(
                f"ckpt_path={str(path)!r}: a model of checkpoint {about['number']}, expected {number}, that of the "
                f"tables or buffer on SSD; open these with their state at that time, or load {newest!r}"
            )
        pointers = _pointers(self._store)
        checkpoint["state_dict"] |= {name: pointers[own] for name, own in about["names"].items()}
        return checkpoint

    def latest(self) -> str | None:
        """Return the file of the newest checkpoint, which is that of the tables or the buffer; None before the first.

        After a kill it gives the file its name, if that is still to be done.
        """
        number, path = self._noted()
        if number == 0:
            return None
        unfinished = Path(path + _NEW)
        if unfinished.exists():
            about = torch.load(unfinished, map_location="cpu", weights_only=False)["memhier"]
            if about["number"] == number:
                os.replace(unfinished, path)
                _sync(Path(path).parent)
        return path

    def _noted(self) -> tuple[int, str]:
        """Return the number and the file of the newest checkpoint, 0 and no name before the first."""
        found: Mapping[str, Any]
        if isinstance(self._store, CarouselBuffer):
            raw = self._store.value(_NAME)
            found = {} if raw is None else _decoded(raw)
        else:
            found = self._store.extra.get(_NAME, {})
        return int(found.get("number", 0)), str(found.get("path", ""))

    def _commit(self, note: dict[str, Any]) -> None:
        if isinstance(self._store, CarouselBuffer):
            self._store.checkpoint({_NAME: f"{note['number']} {note['path']}".encode()})
        else:
            self._store.checkpoint(self._store.extra | {_NAME: note})


def _decoded(raw: bytes) -> dict[str, Any]:
    number, _, path = raw.decode().partition(" ")
    return {"number": number, "path": path}


def _pointers(store: TableModule | CarouselBuffer) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that stand for tables, by their names within the module."""
    if isinstance(store, CarouselBuffer):
        return {}
    state: dict[str, torch.Tensor] = store.state_dict()
    return {name: value for name, value in state.items() if value.dtype == torch.uint8}


def _same(value: Any, pointer: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == pointer.dtype and torch.equal(value.cpu(), pointer)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
