"""DRAM/SSD tiering primitives, and the systems built on them.

The tiers know bytes, rows, slots, plans and devices. Search is in :mod:`memhier.ann`, training in
:mod:`memhier.recsys`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memhier.budget import format_bytes, parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError, LockedError, MemhierError

if TYPE_CHECKING:
    from memhier.cache.slab import Slab
    from memhier.cache.slots import SlotMap
    from memhier.codecs import get_bytes_codec, get_codec
    from memhier.io.device import DeviceProfile, probe
    from memhier.io.reader import Reader
    from memhier.log.row_log import RowLog
    from memhier.log.samples import Samples
    from memhier.planning.cost import CostModel
    from memhier.planning.curves import miss_ratio_curve
    from memhier.planning.plan import Lookahead
    from memhier.planning.simulation import simulate
    from memhier.rows.rows import Rows, RowsWriter
    from memhier.store.store import Store
    from memhier.table.tiered import Tiered

__all__ = [
    "BudgetError",
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
    "simulate",
]

# Loaded when first asked for, so that `import memhier` costs next to nothing.
_HOMES = {
    "CostModel": "planning.cost",
    "DeviceProfile": "io.device",
    "Lookahead": "planning.plan",
    "Reader": "io.reader",
    "RowLog": "log.row_log",
    "Rows": "rows.rows",
    "RowsWriter": "rows.rows",
    "Samples": "log.samples",
    "Slab": "cache.slab",
    "SlotMap": "cache.slots",
    "Store": "store.store",
    "Tiered": "table.tiered",
    "get_bytes_codec": "codecs",
    "get_codec": "codecs",
    "miss_ratio_curve": "planning.curves",
    "probe": "io.device",
    "simulate": "planning.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memhier' has no attribute {name!r}")
    return getattr(import_module(f"memhier.{_HOMES[name]}"), name)
