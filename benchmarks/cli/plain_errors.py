"""Errors of a command in one line: exit code 2 for bad arguments, 1 for everything else."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from click.exceptions import NoArgsIsHelpError

from memhier.errors import BudgetError, MemhierError

__all__ = ["BadArgument", "PlainCommand", "PlainGroup", "plain_errors", "words_of"]


class BadArgument(click.ClickException):
    """An argument that cannot be used."""

    exit_code = 2


class PlainCommand(click.Command):
    """A command whose usage errors take one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, with errors in one line."""
        with _one_line(ctx):
            return super().parse_args(ctx, args)


class PlainGroup(click.Group):
    """A group of such commands."""

    command_class = PlainCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, with errors in one line."""
        with _one_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command as click does, with errors in one line."""
        with _one_line(ctx):
            return super().resolve_command(ctx, args)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of the library into one line: exit code 2 for bad values and budgets, 1 for the rest."""
    try:
        yield
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
        raise BadArgument(f"{error.format_message()} See {ctx.command_path} --help.") from error


def words_of(error: Exception) -> str:
    """Return an error in one line, without the number of an `OSError`."""
    if not isinstance(error, OSError) or not error.strerror:
        return _single(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _single(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
