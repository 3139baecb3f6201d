"""How every command ends: errors in one line, exit code 2 for bad arguments, 1 for failures, 130 for Ctrl-C."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import click
from click.exceptions import NoArgsIsHelpError

from memhier.errors import BudgetError, MemhierError

__all__ = ["BadArgument", "Interrupted", "plain_errors", "plain_manners", "words_of"]


class BadArgument(click.ClickException):
    """An argument that cannot be used."""

    exit_code = 2


class Interrupted(click.ClickException):
    """Ctrl-C."""

    exit_code = 128 + signal.SIGINT


@contextmanager
def plain_manners(ctx: click.Context) -> Iterator[None]:
    """Run a command: its errors take one line, output without a reader ends it, SIGTERM and Ctrl-C clean up."""
    _open_closed_streams()
    _print_any_text(sys.stdout)
    try:
        with _terminable(), plain_errors(), _one_line(ctx):
            try:
                yield
            finally:
                sys.stdout.flush()
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    except BrokenPipeError:
        # Python writes the rest of its buffer at exit, here to a place without a reader.
        with suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        ctx.exit(128 + getattr(signal, "SIGPIPE", 13))


def _open_closed_streams() -> None:
    """Give a command without standard output or standard error, which Python lacks then, a place without a reader."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the end


def _print_any_text(stream: TextIO) -> None:
    """Let a stream of ASCII take any text, and one of UTF-8 the names of files that are no text."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


@contextmanager
def _terminable() -> Iterator[None]:
    """Leave by an exception at SIGTERM, so that a half-made file or index is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of the library into one line: exit code 2 for bad values and budgets, 1 for the rest."""
    try:
        yield
    except BrokenPipeError:
        raise
    except BudgetError as error:
        raise BadArgument(_single(error)) from error
    except OSError as error:
        raise click.ClickException(words_of(error)) from error
    except (MemhierError, ImportError, MemoryError) as error:
        raise click.ClickException(_single(error)) from error
    except KeyError as error:  # its text is quoted
        raise BadArgument(" ".join(str(error.args[0]).split()) if error.args else "KeyError") from error
    except (ValueError, TypeError) as error:
        raise BadArgument(_single(error)) from error


@contextmanager
def _one_line(ctx: click.Context) -> Iterator[None]:
    try:
        yield
    except NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        command = (error.ctx or ctx).command_path
        told = " ".join(error.format_message().split())
        raise BadArgument(f"{told} See {command} --help.") from error


def words_of(error: Exception) -> str:
    """Return an error in one line, without the number of an `OSError`."""
    if not isinstance(error, OSError) or not error.strerror:
        return _single(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _single(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
