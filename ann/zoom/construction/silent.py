"""A progress bar that shows nothing."""

__all__ = ["SilentBar"]


class SilentBar:
    """Hears of progress as tqdm's bar does, and takes none of tqdm's locks.

    A process that was forked shares these with its parent: killed at the wrong moment, it would leave them taken.
    """

    def set_description(self, text: str) -> None:
        """Hear the name of a phase."""

    def update(self, count: int) -> None:
        """Hear how many more vectors are done."""
