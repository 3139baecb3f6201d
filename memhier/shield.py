"""Calls that no interrupt reaches: Ctrl-C strikes the main thread alone, so they run on another while that one waits.

Python raises KeyboardInterrupt between any two instructions of the main thread, `try` and `finally` not excepted: a
lock just taken stays taken, and of two changes that belong together one is made. Here the main thread only waits. An
interrupt that comes before the call has begun takes it back; one that comes later is raised once the call is over. A
second one does not wait: then the next call does. Calls from other threads, which no interrupt strikes, run there.
"""

import atexit
import contextvars
import functools
import operator
import os
import sys
import threading
import weakref
from _thread import LockType, allocate_lock, get_ident, start_new_thread
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, cast

__all__ = [
    "Farewell",
    "ShieldedContext",
    "after_shielded",
    "at_end",
    "caller",
    "check_interrupt",
    "close_made",
    "set_at_once",
    "settle",
    "shielded",
    "shielded_giving",
    "shielded_init",
    "uninterrupted",
    "wait_for",
    "when_gone",
]

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_S = 1.0  # a look at whether the call is over, where its end was not heard
_WAIT_S = 0.05


class _Task:
    """A call that was handed over; its end is what the main thread waits for."""

    __slots__ = ("_claim", "_work", "done", "error", "interrupted", "result")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = functools.partial(contextvars.copy_context().run, work)
        self._claim = allocate_lock()  # for ever with whoever comes first: the one to run it, or to take it back
        self.done = self.interrupted = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Make the call, unless it was taken back."""
        if not self._claim.acquire(blocking=False):
            return
        work, self._work = self._work, None
        try:
            assert work is not None
            self.result = work()
        except BaseException as error:
            self.error = error
        del work
        self.done = True

    def wait(self) -> None:
        """Return once the call is over. May be interrupted, and called again."""
        while not self.done:
            _server.relay.wait(_LOOK_S)

    def interrupt(self) -> bool:
        """Take the call back if it has not begun, or wait for its end; return whether it was made."""
        self.interrupted = True
        if self._claim.acquire(blocking=False):
            self.done = True
            return False
        self.wait()
        return self.error is None


class Farewell(weakref.ref[Any]):
    """A call to make once an object is gone. Its end hands this over by itself: no interrupt comes between."""

    __slots__ = ("_calls", "interrupted")

    def __new__(cls, owner: object, told: Callable[[Any], object], work: Callable[[], object]) -> "Farewell":
        return super().__new__(cls, owner, told)

    def __init__(self, owner: object, told: Callable[[Any], object], work: Callable[[], object]) -> None:
        self._calls = [work]
        self.interrupted: bool = False

    @property
    def due(self) -> bool:
        """Whether the call was not made."""
        return bool(self._calls)

    def run(self) -> None:
        """Make the call, unless that was done."""
        _farewells.pop(id(self), None)
        try:
            work = self._calls.pop()
        except IndexError:
            return
        work()


_farewells: dict[int, Farewell] = {}
"""Those that are kept until they are said."""


class _Relay:
    """Hands calls to the thread that makes them, and the word of their end back.

    The word may be of an earlier call, which an interrupt kept from waiting for it. Not in the compiled core: Python
    ends a thread that waits there at exit, through frames of C++, and the process aborts.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[Any] = SimpleQueue()
        self.put = self._given.put
        self._ended = allocate_lock()
        self._ended.acquire()

    def hand_over(self, task: object, seconds: float) -> None:
        """Have a task run, and wait for the word of an end."""
        self.put(task)
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Wait for the word of an end."""
        self._ended.acquire(timeout=seconds)

    def next(self, ended: bool) -> Any:
        """Give the word that the last task has ended, if it has, and return the next one."""
        if ended and self._ended.locked():
            self._ended.release()
        return self._given.get()


class _Server:
    """The thread that makes calls, one after the other; begun by the first of them."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Know of no calls. A forked child has one thread, which is its main one, and none that serves."""
        self.main = threading.main_thread().ident
        self.thread: int | None = None
        self.current: _Task | Farewell | None = None
        self.relay = _Relay()
        self._begun: LockType = allocate_lock()

    def hand_over(self, task: _Task) -> None:
        """Have a task run."""
        self._begin()
        self.relay.hand_over(task, _LOOK_S)

    def _begin(self) -> None:
        if not self._begun.locked():
            start_new_thread(self._serve, ())

    def say_farewell(self, owner: object, work: Callable[[], object]) -> Farewell:
        """Have a call made once an object is gone, as long as the answer is kept."""
        self._begin()
        return Farewell(owner, self.relay.put, work)

    def _serve(self) -> None:
        # An interrupt may have had a second thread begun: one serves.
        if not self._begun.acquire(blocking=False):
            return
        self.thread = get_ident()
        if (trace := threading.gettrace()) is not None:
            sys.settrace(trace)
        if (profile := threading.getprofile()) is not None:
            sys.setprofile(profile)
        ended = False
        while True:
            self.current = task = self.relay.next(ended)
            _run(task)
            self.current = None
            ended = isinstance(task, _Task)
            del task


def _run(task: _Task | Farewell) -> None:
    try:
        task.run()
    except BaseException:  # of a farewell, which nobody waits for
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), None)))


def _run_all() -> None:
    for farewell in reversed([*_farewells.values()]):
        _run(farewell)


_server = _Server()
atexit.register(_run_all)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_server.begin_anew)
    os.register_at_fork(after_in_child=_farewells.clear)


def uninterrupted(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Make a call that no interrupt reaches.

    Parameters
    ----------
    work
        The call. It ends by itself, or looks with `check_interrupt` whether it should.
    undo
        Called with the result where an interrupt keeps the caller from having it.
    """
    if get_ident() != _server.main or sys.is_finalizing():
        return work()
    task = _Task(work)
    try:
        _server.hand_over(task)
        task.wait()
        if task.error is None:
            return cast(T, task.result)
    except BaseException:
        if task.interrupt() and undo is not None:
            uninterrupted(functools.partial(undo, task.result))
        task.result = None  # the traceback has the task
        raise
    error, task.error = task.error, None
    try:
        raise error
    finally:
        del error, task  # which would keep each other


def shielded(call: Callable[P, T]) -> Callable[P, T]:
    """Return a call that no interrupt reaches."""

    @functools.wraps(call)
    def shield(*args: P.args, **options: P.kwargs) -> T:
        if get_ident() != _server.main:
            return call(*args, **options)
        return uninterrupted(functools.partial(call, *args, **options))

    return shield


def after_shielded(call: Callable[P, T]) -> Callable[P, T]:
    """Return a call that an interrupt may end anywhere; it waits for one that an interrupt has left under way."""

    @functools.wraps(call)
    def waiting(*args: P.args, **options: P.kwargs) -> T:
        if _server.current is None or get_ident() != _server.main:
            return call(*args, **options)
        return uninterrupted(functools.partial(call, *args, **options))

    return waiting


def shielded_giving(undo: Callable[[Any], object]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return what `shielded` does, for calls whose results have to go back where an interrupt loses them."""

    def shielding(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def shield(*args: P.args, **options: P.kwargs) -> T:
            if get_ident() != _server.main:
                return call(*args, **options)
            work: Callable[[], T] = functools.partial(call, *args, **options)
            back: Callable[[T], object] = undo
            return uninterrupted(work, back)  # in one: an interrupt behind it would lose the result

        return shield

    return shielding


class ShieldedContext(AbstractContextManager[T]):
    """A context whose beginning and end no interrupt reaches; for one use.

    Parameters
    ----------
    make
        Returns the context.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._entered = _Entered(make)

    def __enter__(self) -> T:
        entered = self._entered
        if get_ident() == _server.main:
            # For who is interrupted on the way to `__exit__`: it ends when this is forgotten.
            entered.farewell = _server.say_farewell(self, entered.leave)
        return uninterrupted(entered.enter, lambda _: entered.leave())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninterrupted(functools.partial(self._entered.leave, kind, error, trace))


_entered: set["_Entered[Any]"] = set()
"""Contexts that have begun and not ended."""


class _Entered(Generic[T]):
    """A context that ends once, on the thread on which it began."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make: Callable[[], AbstractContextManager[T]] | None = make
        self._inner: AbstractContextManager[T] | None = None
        self.farewell: Farewell | None = None

    def enter(self) -> T:
        """Begin."""
        assert self._make is not None, "a context is for one use"
        inner, self._make = self._make(), None
        entered = inner.__enter__()
        self._inner = inner
        _entered.add(self)
        return entered

    def leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """End, if that has not happened."""
        inner, self._inner = self._inner, None
        if inner is not None:
            _entered.discard(self)
            inner.__exit__(kind, error, trace)


def close_made(made: Any) -> None:
    """Close what was opened for none who has it."""
    made.close()


def shielded_init(init: Callable[P, None]) -> Callable[P, None]:
    """Return an ``__init__`` that no interrupt reaches; what was made for none who has it is closed."""

    @functools.wraps(init)
    def shield(*args: P.args, **options: P.kwargs) -> None:
        made: Any = args[0]
        uninterrupted(functools.partial(init, *args, **options), lambda _: close_made(made))

    return shield


def at_end(owner: object, work: Callable[[], object]) -> object | None:
    """Have a call made once an object is gone, on the thread that no interrupt reaches, as long as the answer is kept.

    Where ``__del__`` made it, an interrupt would be lost: Python prints the error, and goes on. None on threads that no
    interrupt strikes: there ``__del__`` may.
    """
    return None if get_ident() != _server.main else _server.say_farewell(owner, work)


def when_gone(owner: object, work: Callable[[], object]) -> Farewell:
    """Have a call made once an object is gone, on the thread that no interrupt reaches; for all threads, and kept here.

    As `weakref.finalize` does it, which runs Python: an interrupt there would be lost, and a lock might be waited for
    that the thread holds. What is left at exit is made then. A forked child does not make the calls of its parent.
    """
    farewell = _server.say_farewell(owner, work)
    _farewells[id(farewell)] = farewell
    return farewell


@shielded
def settle() -> None:
    """Make the calls for all that is gone by now (`when_gone`), for who cannot wait until they are made."""
    for farewell in [*_farewells.values()]:
        if farewell() is None:
            _run(farewell)


def set_at_once(changes: Sequence[tuple[Any, Any, Any]]) -> None:
    """Set ``target[key] = value`` for each of some, on any thread: no interrupt comes between, as no Python runs.

    Parameters
    ----------
    changes
        Targets, keys and values; targets are arrays, or dicts such as ``vars()`` of an object.
    """
    deque(map(operator.setitem, *zip(*changes, strict=True)), 0)


def caller() -> int | None:
    """Return the identifier of the thread that made the call under way, which this one may only serve."""
    ident = get_ident()
    return _server.main if ident == _server.thread else ident


def check_interrupt() -> None:
    """Raise KeyboardInterrupt where the call under way is to end early; at places where it may."""
    task = _server.current
    if task is not None and task.interrupted and get_ident() == _server.thread:
        raise KeyboardInterrupt


def wait_for(condition: threading.Condition, predicate: Callable[[], bool]) -> None:
    """Wait as ``condition.wait_for`` does, for as long as the call under way is not to end early."""
    while not predicate():
        condition.wait(_WAIT_S if get_ident() == _server.thread else None)
        check_interrupt()
