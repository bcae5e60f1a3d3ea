"""The command line: one short function per verb, one file per group of verbs, and here what they share. What a verb needs is imported
inside it, so that help is instant."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from caraml import __version__
from caraml.base.errors import UNREADABLE, InputError, nearest, unknown_name
from caraml.base.format import count, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from caraml.results.record import Record
    from caraml.results.selector import Selection

_USAGE: Any = typer.BadParameter.__mro__[1]
"""``UsageError``, of whichever library typer has it from."""


class Verbs(TyperGroup):
    """Verbs of which wrong words, options and values are told as every other wrong input is."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _usage_told(info_name or ""):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _usage_told(ctx.command_path, ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown_name(f"verb of {ctx.command_path}:", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


@contextmanager
def _usage_told(verb: str, group: Any = None) -> Iterator[None]:
    """Raise ``InputError`` for what the parser of a verb's words refuses; a group without words is answered with its help all the same."""
    try:
        yield
    except _USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        context, word = getattr(error, "ctx", None), getattr(error, "option_name", None)
        verb = context.command_path if context else f"{verb} {group.invoked_subcommand}" if group else verb
        text, hint = f"{verb}: {error.format_message()}", f"{verb} --help"
        if context and word:
            options = [one for one in context.command.get_params(context) if not getattr(one, "hidden", False)]
            known = [name for one in options for name in (*one.opts, *one.secondary_opts) if name.startswith("-")]
            guess = nearest(word.strip("-"), [name.strip("-") for name in known])
            text, hint = f"{verb}: unknown option {word!r}; known: {', '.join(known)}", f"did you mean '--{guess}'?" if guess else hint
        raise InputError(text.removeprefix("caraml: ").removeprefix("caraml "), hint) from None


app = typer.Typer(cls=Verbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
list_app = typer.Typer(cls=Verbs, no_args_is_help=True, help="List what CARAML knows.")
system_app = typer.Typer(cls=Verbs, no_args_is_help=True, help="What a machine is.")
data_app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Prepare input data.")
app.add_typer(list_app, name="list")
app.add_typer(system_app, name="system")
app.add_typer(data_app, name="data")

_ENDLESS = 100_000
"""Columns of what is no terminal."""
_TOLD = 5
"""Records that cannot be read of which each is told."""
MoreTags = Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="More words after --tag, as JUBE takes them.")]


def unfolded(path: Path) -> Path:
    """A path whose ``~`` no shell has replaced, as in ``--out=~/results``: as it is it would be a folder of that name in this one."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(f"--out {path}: nobody knows which folder {path.parts[0]} is", "--out FOLDER, a whole path") from None


Out = Annotated[Path, typer.Option("--out", envvar="CARAML_RESULTS", callback=unfolded, help="Folder of the results.")]
RESULTS = Path("caraml-results")
NAMES = "suite, SUITE@ROUND, tag, point (key or label), folder or record file"
"""What a verb takes; docs/names.md describes it."""
What = Annotated[str | None, typer.Argument(metavar="[WHAT]", help=f"What: {NAMES}. Default: everything in the folder.")]


@app.callback(invoke_without_command=True)
def caraml(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """CARAML: how fast a machine trains a model, what that costs in energy, and how far it is from the limit."""
    if version:
        say(f"caraml {__version__}")
        raise typer.Exit


def say(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print text, whoever wrote it: a record, a log, a file that is wrong. Lines stay lines; nothing in it commands the terminal."""
    typer.echo(printable(str(text), lines=True), err=err, nl=nl)


def one_of(words: Any, option: str, help: str) -> Any:
    """An option that takes one of a ``Literal``'s words; any other is an error that lists them, with the nearest."""
    names = get_args(words)

    def read(word: str) -> str:
        if word not in names:
            raise unknown_name(f"value of {option}", word, names)
        return word

    return typer.Option(option, metavar=f"<{'|'.join(names)}>", parser=read, help=help)


def two_columns(lines: dict[str, str]) -> None:
    """Print names and what they mean."""
    width = max(map(len, lines)) + 2
    for name, text in lines.items():
        say(f"{name:<{width}}{text}")


def console() -> Console:
    """The terminal, for tables and the like. Their texts are printed as :func:`say` prints them; only styles of ours command it. What goes
    into a file or a pipe is as wide as it is, a line for each row, unless the variable ``COLUMNS`` says how wide it may be."""
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Screen(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            if self.width < _ENDLESS:
                for segment in super().render(renderable, options):
                    yield segment if segment.control else Segment(printable(segment.text, lines=True), segment.style)
                return
            text = "".join(segment.text for segment in super().render(_in_whole_lines(renderable), options))
            yield Segment("\n".join(line.rstrip() for line in printable(text, lines=True).split("\n")))

    screen = Screen()
    return screen if screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal() else Screen(width=_ENDLESS)


def _in_whole_lines(renderable: RenderableType) -> RenderableType:
    """A table with each row in one line, and a rule as its title alone: for files and programs, which have no width."""
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    if isinstance(renderable, Rule):
        return Text(str(renderable.title))
    if isinstance(renderable, Table):
        for column in renderable.columns:
            column.width = column.max_width = column.ratio = None
            column.no_wrap = True
            for cell in column.cells:
                if isinstance(cell, Text) and "\n" in cell.plain:
                    cell.plain = "  ".join(cell.plain.split("\n"))
        renderable.padding = (0, renderable.padding[1], 0, 0)
    return renderable


def chosen(name: str | None, out: Path) -> Selection:
    """The results that a name stands for, everything below ``out`` without one; none at all is an error, since an empty table explains
    nothing."""
    from caraml.results.selector import elsewhere, select

    found = select(name, out)
    if not found.points:
        root = found.store.root
        raise InputError(f"no results below {root}" if not found.listings else f"{name} has no result below {root}", elsewhere(root))
    return found


def told(records: Sequence[Record]) -> Sequence[Record]:
    """Records as they are; those that cannot be read are told on standard error."""
    tell_unreadable([str(record.reason) for record in records if record.unreadable])
    return records


def tell_unreadable(reasons: Sequence[str], so: str = "taken as invalid") -> None:
    """Say on standard error which records cannot be read, why, and what to do; ``so`` is what that means here."""
    if reasons:
        lines = [reason.removeprefix(UNREADABLE) for reason in reasons[:_TOLD]]
        more = [f"and {len(reasons) - _TOLD:,} more"] if len(reasons) > _TOLD else []
        say("\n  ".join([f"caraml: {count(len(reasons), 'record')} cannot be read, {so}:", *lines, *more]), err=True)
