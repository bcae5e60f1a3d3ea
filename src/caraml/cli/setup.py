"""Verbs about what measuring needs: list, system show|validate|detect, doctor, container build|pull, data prepare|pack|stage|unstage."""

from __future__ import annotations

import shlex
import subprocess
from errno import ENOTDIR
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from caraml.base.errors import EnvironmentUnfitError, ExitCode, InputError
from caraml.base.format import count
from caraml.cli import RESULTS, Out, Verbs, app, console, data_app, list_app, say, system_app, two_columns, unfolded

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@list_app.command("suites")
def list_suites() -> None:
    """Suites that come with CARAML."""
    from caraml.suite.load import catalog_suites, load_suite

    two_columns({name: load_suite(name).suite.title for name in catalog_suites()})


@list_app.command("workloads")
def list_workloads() -> None:
    """What can be trained."""
    from caraml.workloads import titles

    two_columns(titles())


@list_app.command("systems")
def list_systems() -> None:
    """Machines that have a description: those that come with CARAML, your own, and those of ./systems, which suites here find."""
    from caraml.report.tables import systems_table
    from caraml.system.catalogue import list_systems as systems

    console().print(systems_table(systems(_suite_here())))


def _suite_here() -> Path | None:
    """Any suite of the current folder, there or not: systems are looked for beside it, as `run` does. ``None``, with a word about it, where
    others could write to those: what is known besides can be shown."""
    from caraml.system.catalogue import user_folders

    suite = Path("suite.toml")
    try:
        user_folders(suite)
    except InputError as error:
        say(f"caraml: left out: {error.line}", err=True)
        return None
    return suite


@system_app.command("show")
def system_show(
    name: Annotated[str, typer.Argument(help="A name or alias of `caraml list systems`, `local`, or a TOML file.")], json: Json = False
) -> None:
    """Show what is known about a machine, each figure with its source."""
    from caraml.report.tables import rows_table, system_rows
    from caraml.system.catalogue import load_system

    system = load_system(name, _suite_here())
    if json:
        say(system.model_dump_json(indent=2))
        return
    aliases = f" ({', '.join(system.aliases)})" if system.aliases else ""
    console().print(f"{system.name}{aliases}: {system.title}", markup=False, highlight=False)
    console().print(rows_table(system_rows(system)))
    for note in system.notes:
        console().print(f"* {note}", markup=False, highlight=False)


@system_app.command("validate")
def system_validate(file: Annotated[Path, typer.Argument(help="A TOML file that describes a machine.")]) -> None:
    """Check the description of a machine: every fault with its line, figures without a source among them."""
    from caraml.system.catalogue import described

    found = described(file)
    over = f", over {' and '.join(str(path) for path in found.files[:-1])}" if len(found.files) > 1 else ""
    say(f"{file}: describes {found.system.name}, {found.system.title}{over}")


@system_app.command("detect")
def system_detect(json: Json = False) -> None:
    """Describe this machine as a TOML file that `caraml system validate` accepts: `caraml system detect > my.toml`."""
    from caraml.report.tables import as_toml
    from caraml.system.detect import detect

    system = detect()
    say(system.model_dump_json(indent=2) if json else as_toml(system), nl=json)


@app.command()
def doctor(
    out: Out = RESULTS,
    json: Json = False,
    names: Annotated[bool, typer.Option("--names", help="With --json: keep names of host and user, device ids, Slurm job.")] = False,
) -> None:
    """Say what this machine can measure, what is missing, and the command that would mend it."""
    from caraml.doctor import checks, report
    from caraml.report.tables import plain_table

    if out.is_file():
        raise NotADirectoryError(ENOTDIR, "not a folder", str(out))
    found = checks(out)
    if json:
        say(dumps(report(found, names), indent=2))
    else:
        rows = [[one.status, one.name, one.found, one.fix or ""] for one in found]
        console().print(plain_table(["", "check", "found", "what would help"], rows))
    raise typer.Exit(ExitCode.ENVIRONMENT_UNFIT if any(check.status == "missing" for check in found) else ExitCode.OK)


container_app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Make images that points run in.")
app.add_typer(container_app, name="container")

Runtime = Annotated[str, typer.Option("--runtime", help="apptainer, singularity, podman or charliecloud.")]


@container_app.command("build")
def container_build(
    definition: Annotated[Path, typer.Argument(help="Apptainer definition file, e.g. containers/cuda.def.")],
    image: Annotated[Path, typer.Argument(help="Image file to write.")],
    runtime: Runtime = "apptainer",
) -> None:
    """Build an image from a definition file; prints the command and runs it."""
    from caraml.launch.container import build_command, runtime_called

    _run(build_command(runtime_called(runtime), definition, image))


@container_app.command("pull")
def container_pull(
    image: Annotated[str, typer.Argument(help="Name in a registry, e.g. docker://python:3.12.")],
    file: Annotated[Path | None, typer.Argument(help="Image file to write; Podman and Charliecloud keep images themselves.")] = None,
    runtime: Runtime = "apptainer",
) -> None:
    """Fetch an image from a registry; prints the command and runs it."""
    from caraml.launch.container import pull_command, runtime_called

    _run(pull_command(runtime_called(runtime), image, file))


def _run(command: list[str]) -> None:
    say(f"$ {shlex.join(command)}")
    code = subprocess.run(command, check=False).returncode  # noqa: S603 -- made by caraml.launch.container of the user's own words; no shell
    if code:
        raise EnvironmentUnfitError(f"{command[0]} ended with exit status {code}")


prepare_app = typer.Typer(cls=Verbs, no_args_is_help=True, help="Write data sets that workloads read.")
data_app.add_typer(prepare_app, name="prepare")


Gigabytes = Annotated[float | None, typer.Option(min=0, help="Bytes of all files (1e9 each); goes on where it was ended.")]


@prepare_app.command("text")
def prepare_text(  # noqa: PLR0917 -- options, which nobody gives by position
    out: Annotated[Path, typer.Option("--out", callback=unfolded, help="Prefix of the .bin and .idx files.")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="Files or folders: JSONL (.xz, .gz, .zst), Parquet, plain text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, or folder with vocab.json and merges.txt.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Words of the tokenizer that is trained when none is given.")] = 8192,
    text_key: Annotated[str, typer.Option(help="Field that holds a document's text.")] = "text",
    documents: Annotated[int | None, typer.Option(min=1, help="Only so many documents, the first.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Only as many whole documents as have at most so many tokens together.")] = None,
    gigabytes: Gigabytes = None,
) -> None:
    """Tokenise documents into Megatron's indexed format; with --gigabytes, draw them anew until there are as many tokens."""
    from caraml.data.store import only_writer
    from caraml.workloads.gpt.text import grow_text
    from caraml.workloads.gpt.text import prepare_text as prepare

    limits = {"most_documents": documents, "most_tokens": tokens}
    if gigabytes is not None:
        if documents or tokens:
            raise InputError("--gigabytes: found --documents or --tokens beside it, expected one of them", "leave the others out")
        with only_writer(out):
            done = grow_text(inputs or [], out, gigabytes, tokenizer, vocab_size, text_key, _tell)
    elif inputs:
        done = prepare(inputs, out, tokenizer=tokenizer, vocab_size=vocab_size, text_key=text_key, **limits)
    else:
        raise InputError("inputs: found none, expected files or folders", "without any, --gigabytes N draws the standard library's sources")
    fewer = "; the input has no more" if documents and done.documents < documents and not tokens else ""
    say(f"{done.prefix}: {count(done.documents, 'document')}, {count(done.tokens, 'token')}, vocabulary {done.vocab_size:,}{fewer}")


@prepare_app.command("images")
def prepare_images(
    out: Annotated[Path, typer.Option("--out", callback=unfolded, help="Folder to write, new or empty.")],
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 10,
    per_class: Annotated[int, typer.Option(min=1, help="Images per class.")] = 100,
    seed: Annotated[int, typer.Option(help="Same seed, same images.")] = 0,
    gigabytes: Gigabytes = None,
) -> None:
    """Draw an image folder with ImageNet's distribution of sizes; with --gigabytes, of as many images as that takes."""
    from caraml.data.store import only_writer
    from caraml.workloads.image_classification.store import generate_image_folder, grow_image_folder

    if gigabytes is not None:
        with only_writer(out):
            images, written = grow_image_folder(out, gigabytes, classes, seed, _tell)
    else:
        images, written = generate_image_folder(out, classes, per_class, seed)
    say(f"{out}: {images:,} images in {classes:,} classes, {written:,} bytes")


@prepare_app.command("weather")
def prepare_weather(
    application: Annotated[str, typer.Argument(help="ap1 ... ap6, or atmorep.")],
    out: Annotated[Path, typer.Option("--out", callback=unfolded, help="Folder to write; it must be new or empty.")],
    size: Annotated[
        str | None, typer.Option(help="tiny: for tests. small: samples of the published size. Default: tiny, or small of many.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same files.")] = 0,
    gigabytes: Gigabytes = None,
) -> None:
    """Write look-alike NetCDF files of a weather and climate application."""
    from caraml.data.store import only_writer
    from caraml.workloads.weather import grow_weather, prepare_weather

    if gigabytes is None:
        files, written = prepare_weather(application, out, size or "tiny", seed)
    else:
        with only_writer(out):
            files, written = grow_weather(application, out, gigabytes, size or "small", seed, _tell)
    say(f"{out}: {count(files, 'file')}, {written:,} bytes")


def _tell(done: int, of: int) -> None:
    """Say how far it is, twenty times."""
    if done * 20 // of > (done - 1) * 20 // of:
        say(f"{done:,} of {of:,} parts", err=True)


@data_app.command("pack")
def pack(
    folder: Annotated[Path, typer.Argument(help="Image folder: ROOT/CLASS/IMAGE.")],
    out: Annotated[
        Path, typer.Option("--out", callback=unfolded, help="NAME.lmdb, .tar, .zip or .sqsh; no ending: a folder of tar shards.")
    ],
    shard: Annotated[int, typer.Option(min=1, help="Images per tar shard.")] = 10_000,
) -> None:
    """Write an image folder as one LMDB, as tar shards or as an archive."""
    from caraml.workloads.image_classification.packed import pack_images

    images, files, written = pack_images(folder, out, shard)
    say(f"{out}: {count(images, 'image')} in {count(files, 'file')}, {written:,} bytes")


@data_app.command("stage")
def stage(
    source: Annotated[Path, typer.Argument(help="File, folder or archive to bring to this node.")],
    to: Annotated[Path, typer.Option("--to", help="Folder on this node, such as /dev/shm.")],
    unpack: Annotated[bool, typer.Option("--unpack", help="Unpack the archive instead of copying it.")] = False,
) -> None:
    """Copy or unpack data to storage of this node, where runs with the same `stage` find it again."""
    from caraml.data.staging import stage as bring

    done = bring(source, to, unpack=unpack)
    took = "was there already" if done.again else f"took {done.seconds:,.2f} s"
    say(f"{done.path}: {done.bytes:,} bytes, {took}")


@data_app.command("unstage")
def unstage(to: Annotated[Path, typer.Option("--to", help="Folder that data was staged to.")]) -> None:
    """Remove everything that was staged to a folder."""
    from caraml.data.staging import unstage as remove

    removed = remove(to)
    say("\n".join([*(f"removed {folder}" for folder in removed), f"{len(removed)} removed"]))
