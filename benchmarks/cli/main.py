"""The ``memhier`` command. Each command is imported when it is called, so that ``memhier --help`` answers at once."""

import sys
from importlib import import_module
from typing import Any

try:
    import click
    from click.shell_completion import CompletionItem
except ImportError:
    sys.exit("memhier: the command needs click: pip install 'memhier[cli]'")

from memhier.benchmarks.cli.plain_errors import BadArgument, plain_manners
from memhier.lazy import EXTRAS

__all__ = ["main"]

# Each command: its module, which holds it as an attribute of the same name, and its line in --help, which stands here
# so that --help imports no command.
COMMANDS = {
    "demo": ("memhier.benchmarks.cli.demo.command", "Search every function of this Python installation from SSD."),
    "probe": ("memhier.benchmarks.cli.probe", "Measure the device under a path."),
    "plan": ("memhier.benchmarks.cli.plan", "Say how many machines an index, tables or a replay buffer need."),
    "simulate": ("memhier.benchmarks.cli.simulate", "Compute how much DRAM a trace of accesses needs."),
    "bench": ("memhier.benchmarks.bench.command", "Measure memhier beside its rivals."),
    "replay": ("memhier.benchmarks.cli.replay.command", "Inspect, check and export a replay buffer; test its disk."),
    "index": ("memhier.benchmarks.cli.index.command", "Build, search, change, export and check a vector index on SSD."),
    "serve": ("memhier.benchmarks.cli.serve", "Serve a vector index over HTTP on this machine."),
    "doctor": ("memhier.benchmarks.cli.doctor.command", "Check whether this machine runs memhier, and how well."),
}


class LazyGroup(click.Group):
    """A group that lists its commands without importing them, and gives all of them the same manners."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with plain_manners(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with plain_manners(ctx):
            return super().invoke(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items()]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [item for item in commands if item.value.startswith(incomplete)] + options

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            command = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name)
        except ModuleNotFoundError as error:
            extra = "cli" if error.name == "tqdm" else EXTRAS.get(error.name or "")
            if error.name in ("fcntl", "resource"):
                raise click.ClickException(f"memhier {cmd_name} needs Linux or macOS") from error
            if extra is None:
                raise
            if ctx.resilient_parsing:  # of a completion, which says nothing
                return None
            needed = f"memhier {cmd_name} needs {error.name}: pip install 'memhier[{extra}]'"
            raise click.ClickException(needed) from error
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing and not args[0].startswith("-"):
            raise BadArgument(f"there is no command {args[0]!r}: expected one of {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="memhier")
def main() -> None:
    """Search, decode and train on data that outgrows DRAM."""
