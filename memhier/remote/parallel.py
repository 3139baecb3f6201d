"""Several transfers at a time: the first error ends the others, and so does an interrupt."""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from memhier.shield import check_interrupt, shielded

__all__ = ["IN_FLIGHT", "each_in_parallel"]

T = TypeVar("T")

IN_FLIGHT = 8
_LOOK_S = 0.05


@shielded
def each_in_parallel(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Do the work for each item, eight at a time; items are taken only as others end.

    Raises
    ------
    Exception
        The first error; no further item is begun then.
    """
    with ThreadPoolExecutor(IN_FLIGHT, "memhier-transfer") as pool:
        under_way: set[Future[object]] = set()
        try:
            for item in items:
                check_interrupt()
                under_way.add(pool.submit(work, item))
                if len(under_way) == 2 * IN_FLIGHT:
                    under_way = _after_some(under_way)
            while under_way:
                under_way = _after_some(under_way)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the work that has not begun; the rest is waited for
            raise


def _after_some(under_way: set[Future[object]]) -> set[Future[object]]:
    """Wait until some of the work is done, and return the rest."""
    done: set[Future[object]] = set()
    while not done:
        check_interrupt()
        done, under_way = wait(under_way, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return under_way
