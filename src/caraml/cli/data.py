"""Verbs that prepare input: data prepare text, images, weather; data pack, stage, unstage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caraml.cli.app import data_app, say

prepare_app = typer.Typer(no_args_is_help=True, help="Write data sets that workloads read.")
data_app.add_typer(prepare_app, name="prepare")


Gigabytes = Annotated[float | None, typer.Option(min=0, help="Bytes of all files (1e9 each); goes on where it was ended.")]


@prepare_app.command("text")
def prepare_text(  # noqa: PLR0917 -- options, which nobody gives by position
    out: Annotated[Path, typer.Option("--out", help="Prefix of the .bin and .idx files.")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="Files or folders: JSONL (.xz, .gz, .zst), Parquet, plain text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, or folder with vocab.json and merges.txt.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Words of the tokenizer that is trained when none is given.")] = 8192,
    text_key: Annotated[str, typer.Option(help="Field that holds a document's text.")] = "text",
    documents: Annotated[int | None, typer.Option(min=1, help="Only so many documents, the first.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Only as many whole documents as have at most so many tokens together.")] = None,
    gigabytes: Gigabytes = None,
) -> None:
    """Tokenise documents into Megatron's indexed format; with --gigabytes, draw them anew until there are as many tokens."""
    from caraml.base.errors import InputError
    from caraml.workloads.gpt.lookalike import grow_text
    from caraml.workloads.gpt.text import prepare_text as prepare

    limits = {"most_documents": documents, "most_tokens": tokens}
    if gigabytes is not None:
        if documents or tokens:
            raise InputError("--gigabytes: found --documents or --tokens beside it, expected one of them", "leave the others out")
        done = grow_text(inputs or [], out, gigabytes, tokenizer, vocab_size, text_key, _tell)
    elif inputs:
        done = prepare(inputs, out, tokenizer=tokenizer, vocab_size=vocab_size, text_key=text_key, **limits)
    else:
        raise InputError("inputs: found none, expected files or folders", "without any, --gigabytes N draws the standard library's sources")
    say(f"{done.prefix}: {done.documents:,} documents, {done.tokens:,} tokens, vocabulary {done.vocab_size:,}")


@prepare_app.command("images")
def prepare_images(
    out: Annotated[Path, typer.Option("--out", help="Folder to write, new or empty.")],
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 10,
    per_class: Annotated[int, typer.Option(min=1, help="Images per class.")] = 100,
    seed: Annotated[int, typer.Option(help="Same seed, same images.")] = 0,
    gigabytes: Gigabytes = None,
) -> None:
    """Draw an image folder with ImageNet's distribution of sizes; with --gigabytes, of as many images as that takes."""
    from caraml.workloads.image_classification.generator import generate_image_folder, grow_image_folder

    if gigabytes is not None:
        images, written = grow_image_folder(out, gigabytes, classes, seed, _tell)
    else:
        done = generate_image_folder(out, classes, per_class, seed)
        images, written = done.images, done.bytes
    say(f"{out}: {images:,} images in {classes:,} classes, {written:,} bytes")


@prepare_app.command("weather")
def prepare_weather(
    application: Annotated[str, typer.Argument(help="ap1 ... ap6, or atmorep.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it must be new or empty.")],
    size: Annotated[
        str | None, typer.Option(help="tiny: for tests. small: samples of the published size. Default: tiny, or small of many.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same files.")] = 0,
    gigabytes: Gigabytes = None,
) -> None:
    """Write look-alike NetCDF files of a weather and climate application."""
    from caraml.workloads.weather.lookalikes import grow_weather, prepare_weather

    if gigabytes is None:
        done = prepare_weather(application, out, size or "tiny", seed)
    else:
        done = grow_weather(application, out, gigabytes, size or "small", seed, _tell)
    say(f"{out}: {done.files:,} files, {done.bytes:,} bytes")


def _tell(done: int, of: int) -> None:
    """Say how far it is, twenty times."""
    if done * 20 // of > (done - 1) * 20 // of:
        say(f"{done:,} of {of:,} parts", err=True)


@data_app.command("pack")
def pack(
    folder: Annotated[Path, typer.Argument(help="Image folder: ROOT/CLASS/IMAGE.")],
    out: Annotated[Path, typer.Option("--out", help="NAME.lmdb, .tar, .zip or .sqsh; no ending: a folder of tar shards.")],
    shard: Annotated[int, typer.Option(min=1, help="Images per tar shard.")] = 10_000,
) -> None:
    """Write an image folder as one LMDB, as tar shards or as an archive."""
    from caraml.workloads.image_classification.store import pack_images

    done = pack_images(folder, out, shard)
    say(f"{out}: {done.images:,} images in {done.files:,} {'file' if done.files == 1 else 'files'}, {done.bytes:,} bytes")


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
