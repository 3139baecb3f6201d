"""DRAM/SSD tiering primitives, and the systems built on them.

The tiers know bytes, rows, slots, plans and devices. Search is in :mod:`memhier.ann`, training in
:mod:`memhier.recsys`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memhier.budget import format_bytes, parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError, LockedError, MemhierError

if TYPE_CHECKING:
    from memhier.checkpoint import CheckpointWriter, read_checkpoint
    from memhier.codecs import get_bytes_codec, get_codec
    from memhier.cost import CostModel
    from memhier.curves import miss_ratio_curve
    from memhier.device import DeviceProfile, probe
    from memhier.plan import Lookahead
    from memhier.reader import Reader
    from memhier.row_log import RowLog
    from memhier.rows import Rows, RowsWriter
    from memhier.samples import Samples
    from memhier.simulation import simulate
    from memhier.slab import Slab
    from memhier.slots import SlotMap
    from memhier.store import Store
    from memhier.tiered import Tiered

__all__ = [
    "BudgetError",
    "CheckpointWriter",
    "ClosedError",
    "CorruptionError",
    "CostModel",
    "DeviceProfile",
    "FormatError",
    "LockedError",
    "Lookahead",
    "MemhierError",
    "Reader",
    "RowLog",
    "Rows",
    "RowsWriter",
    "Samples",
    "Slab",
    "SlotMap",
    "Store",
    "Tiered",
    "format_bytes",
    "get_bytes_codec",
    "get_codec",
    "miss_ratio_curve",
    "parse_bytes",
    "probe",
    "read_checkpoint",
    "simulate",
]

# Loaded when first asked for, so that `import memhier` costs next to nothing.
_HOMES = {
    "CheckpointWriter": "checkpoint",
    "CostModel": "cost",
    "DeviceProfile": "device",
    "Lookahead": "plan",
    "Reader": "reader",
    "RowLog": "row_log",
    "Rows": "rows",
    "RowsWriter": "rows",
    "Samples": "samples",
    "Slab": "slab",
    "SlotMap": "slots",
    "Store": "store",
    "Tiered": "tiered",
    "get_bytes_codec": "codecs",
    "get_codec": "codecs",
    "miss_ratio_curve": "curves",
    "probe": "device",
    "read_checkpoint": "checkpoint",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memhier' has no attribute {name!r}")
    return getattr(import_module(f"memhier.{_HOMES[name]}"), name)
