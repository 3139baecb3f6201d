"""DRAM/SSD tiering primitives, and the systems built on them.

The tiers know bytes, rows, slots, plans and devices. Search is in :mod:`memhier.ann`, training in
:mod:`memhier.recsys`.
"""

from memhier.budget import format_bytes, parse_bytes
from memhier.device import DeviceProfile, probe
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError, LockedError, MemhierError
from memhier.reader import Reader
from memhier.rows import Rows, RowsWriter
from memhier.store import Store

__all__ = [
    "BudgetError",
    "ClosedError",
    "CorruptionError",
    "DeviceProfile",
    "FormatError",
    "LockedError",
    "MemhierError",
    "Reader",
    "Rows",
    "RowsWriter",
    "Store",
    "format_bytes",
    "parse_bytes",
    "probe",
]
