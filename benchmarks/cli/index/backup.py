"""``memhier index push``, ``pull``, ``backups``, ``prune``: copies of an index at a URL."""

from dataclasses import asdict
from typing import Any

import click

from memhier import backups, prune_backups
from memhier.ann import ZoomIndex
from memhier.arguments import counted, is_url
from memhier.benchmarks.cli.index.inputs import index_path
from memhier.benchmarks.cli.shell import Terminal, json_option, new_table, report, working, write_json
from memhier.budget import format_bytes
from memhier.remote.far_side import Backup

__all__ = ["existing_backups", "list_backups", "prune", "pull", "push"]


class _Url(click.ParamType[str]):
    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not is_url(value):
            self.fail(f"{value!r}: expected a URL such as s3://bucket/index or file:///folder/index.", param, ctx)
        return value


_url = click.argument("url", type=_Url())
_ALWAYS = ("generation", "moved_objects", "moved_bytes")


def existing_backups(url: str) -> list[Backup]:
    """Return the generations at a URL; there is one at least."""
    found = backups(url)
    if not found:
        raise click.ClickException(f"{url}: there is no backup")
    return found


@click.command()
@index_path
@_url
@click.option("--keep", type=click.IntRange(1), help="Generations that stay there.  [default: all]")
@click.option("--verify", is_flag=True, help="Read the objects that are there, too, and write damaged ones again.")
@json_option
def push(path: str, url: str, keep: int | None, verify: bool, json_path: str | None) -> None:
    """Back up the index at PATH to a URL, such as s3://bucket/index.

    Only objects that the URL lacks move. A push that was cut short goes on where it ended.
    """
    with ZoomIndex.open(path) as opened, working(f"Pushing {path} to {url} ..."):
        moved = opened.push(url, keep=keep, verify=verify)
    report(f"Pushed {path} to {url}", asdict(moved), json_path, _ALWAYS)


@click.command()
@_url
@click.argument("path", type=click.Path())
@click.option("--generation", type=click.IntRange(1), help="The one to restore.  [default: the newest]")
@json_option
def pull(url: str, path: str, generation: int | None, json_path: str | None) -> None:
    """Restore a backup at a URL into the directory PATH.

    An older copy there is brought up to date. Each object is checked. A pull that was cut short goes on where it ended.
    """
    with working(f"Pulling {url} ..."):
        moved = ZoomIndex.pull(url, path, generation=generation)
    report(f"Pulled {url} into {path}", asdict(moved), json_path, _ALWAYS)


@click.command("backups")
@_url
@json_option
def list_backups(url: str, json_path: str | None) -> None:
    """List the generations at a URL, the newest last."""
    found = existing_backups(url)
    if write_json([asdict(each) for each in found], json_path):
        return
    table = new_table(*((name, "right") for name in ("push", "kind", "generation", "objects", "size")))
    for each in found:
        cells = (each.number, each.kind, each.generation, f"{each.objects:,}", format_bytes(each.nbytes))
        table.add_row(*map(str, cells))
    Terminal().print(table)


@click.command()
@_url
@click.option("--keep", type=click.IntRange(1), required=True, help="Generations that stay.")
def prune(url: str, keep: int) -> None:
    """Remove the older generations at a URL.

    Their objects go, but for those that a newer one needs. Do not prune while another machine pushes there.
    """
    existing_backups(url)
    with working(f"Pruning {url} ..."):
        removed = prune_backups(url, keep)
    click.echo(f"{url}: {counted(removed, 'object')} removed, {counted(len(backups(url)), 'generation')} left")
