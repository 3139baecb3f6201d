"""The file layer: everything persistent goes through it, so that faults and crashes can be rehearsed.

`RealFiles` calls the operating system, `MemoryFiles` knows the states that a power cut may leave, and `FaultyFiles`
wraps either to fail at a chosen call.
"""

from memhier.files._faulty import Fault, FaultyFiles, SimulatedCrash
from memhier.files._interface import Buffer, File, FileBase, Files, Mode, read_file
from memhier.files._memory import MemoryFiles
from memhier.files._real import RealFiles, close_descriptor, close_with
from memhier.files._system import O_DIRECT, OPEN_FLAGS, keep_out_of_cache, read_at, set_direct

__all__ = [
    "OPEN_FLAGS", "O_DIRECT", "Buffer", "Fault", "FaultyFiles", "File", "FileBase", "Files", "MemoryFiles", "Mode",
    "RealFiles", "SimulatedCrash", "close_descriptor", "close_with", "keep_out_of_cache", "read_at", "read_file",
    "set_direct",
]  # fmt: skip
