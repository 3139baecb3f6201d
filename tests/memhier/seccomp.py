"""A program for a child process: denies itself system calls, then reads through the library and says how it went.

``python seccomp.py PATH ERRNO NAME...`` prints one line of JSON. Installing a filter needs no rights, but it stays for
the life of the process, so it cannot be a fixture.
"""

import ctypes
import json
import platform
import sys

# Numbers of the calls to deny, and the kernel's name for the architecture they belong to.
_CALLS = {
    "x86_64": (0xC000003E, {"uring": (425, 426, 427), "aio": (206, 207, 208, 209, 210)}),
    "aarch64": (0xC00000B7, {"uring": (425, 426, 427), "aio": (0, 1, 2, 3, 4)}),
}
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def deny(names: list[str], error: int) -> None:
    """Let the named groups of system calls fail with `error` from now on."""
    architecture, calls = _CALLS[platform.machine()]
    numbers = [number for name in names for number in calls[name]]
    program = [
        _Instruction(_LOAD, 0, 0, 4),
        _Instruction(_JUMP_EQUAL, 1, 0, architecture),
        _Instruction(_RETURN, 0, 0, _ALLOW),
        _Instruction(_LOAD, 0, 0, 0),
    ]
    for number in numbers:
        program += [_Instruction(_JUMP_EQUAL, 0, 1, number), _Instruction(_RETURN, 0, 0, _ERRNO | error)]
    program.append(_Instruction(_RETURN, 0, 0, _ALLOW))
    array = (_Instruction * len(program))(*program)
    filtered = _Program(len(program), array)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filtered), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def main(path: str, error: str, *names: str) -> None:
    """Read a file's pages backwards and print engine, and whether the bytes are right, or the error."""
    try:
        deny(list(names), int(error))
    except (OSError, KeyError) as refused:
        print(json.dumps({"skip": f"no seccomp here: {refused!r}"}))
        return
    import numpy as np

    from memhier.io.reader import Reader

    try:
        with Reader() as reader, open(path, "rb") as file:
            content = file.read()
            offsets = np.arange(len(content) - 100, -1, -997)
            rows = reader.read(reader.add(path), offsets, 100)
            right = all(row.tobytes() == content[at : at + 100] for row, at in zip(rows, offsets.tolist(), strict=True))
            print(json.dumps({"engine": reader.stats()["engine"], "right": right}))
    except (OSError, RuntimeError) as failed:
        print(
            json.dumps({"error": type(failed).__name__, "text": str(failed), "errno": getattr(failed, "errno", None)})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
