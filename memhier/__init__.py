"""DRAM/SSD tiering primitives, and the systems built on them.

The tiers know bytes, rows, slots, plans and devices. Search is in :mod:`memhier.ann`, training in
:mod:`memhier.recsys`.
"""

from typing import TYPE_CHECKING

from memhier.budget import format_bytes, parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError, LockedError, MemhierError
from memhier.lazy import lazy

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
    from memhier.remote.far_side import backups, check_backup, prune_backups
    from memhier.rows.rows import Rows, RowsWriter
    from memhier.store.store import Store
    from memhier.table.tiered import Tiered
    from memhier.version import __version__ as __version__

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
    "backups",
    "check_backup",
    "format_bytes",
    "get_bytes_codec",
    "get_codec",
    "miss_ratio_curve",
    "parse_bytes",
    "probe",
    "prune_backups",
    "simulate",
]

# Loaded when first asked for, so that `import memhier` costs next to nothing.
if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "__version__": "memhier.version",
            "CostModel": "memhier.planning.cost",
            "DeviceProfile": "memhier.io.device",
            "Lookahead": "memhier.planning.plan",
            "Reader": "memhier.io.reader",
            "RowLog": "memhier.log.row_log",
            "Rows": "memhier.rows.rows",
            "RowsWriter": "memhier.rows.rows",
            "Samples": "memhier.log.samples",
            "Slab": "memhier.cache.slab",
            "SlotMap": "memhier.cache.slots",
            "Store": "memhier.store.store",
            "Tiered": "memhier.table.tiered",
            "backups": "memhier.remote.far_side",
            "check_backup": "memhier.remote.far_side",
            "get_bytes_codec": "memhier.codecs",
            "get_codec": "memhier.codecs",
            "miss_ratio_curve": "memhier.planning.curves",
            "probe": "memhier.io.device",
            "prune_backups": "memhier.remote.far_side",
            "simulate": "memhier.planning.simulation",
        },
        [*globals()],
    )
