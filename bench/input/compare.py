"""CARAML's image loading beside torchvision's, on the same files: images per second, and per second of CPU time.

Every contestant gives batches of random resized crops of 224 x 224 pixels, mirrored half of the time, through torch's DataLoader. Rounds
are interleaved and their order turns, so that other work on the machine meets all alike; the table gives medians over rounds and the
ratio to torchvision within each round.

    python bench/input/compare.py [--folder ROOT] [--workers N] [--rounds N] [--images N] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caraml.data.loader import stream
from caraml.workloads import make_torchvision_importable
from caraml.workloads.image_classification.images import ImageSamples
from caraml.workloads.image_classification.packed import LmdbStore, TarStore, pack_images
from caraml.workloads.image_classification.store import FolderStore, default_image_folder

BATCH = 64


@dataclass(frozen=True)
class Contestant:
    """What is compared: its name and how it starts giving batches; the second function ends it."""

    name: str
    start: Callable[[int, int], tuple[Iterator[Any], Callable[[], None]]]
    """Takes the number of workers and a seed."""


def torchvision_loader(root: Path, normalised: bool) -> Callable[[int, int], tuple[Iterator[Any], Callable[[], None]]]:
    """ImageFolder with the transforms of torchvision's and PyTorch's own examples, and DataLoader's defaults.

    ``normalised``: ToTensor and Normalize in the workers, as those examples do; else bytes, as ours.
    """
    make_torchvision_importable()
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    last: list[Any] = [transforms.PILToTensor()]
    if normalised:
        last = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    data = ImageFolder(str(root), transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *last]))

    def start(workers: int, seed: int) -> tuple[Iterator[Any], Callable[[], None]]:
        generator = torch.Generator().manual_seed(seed)
        loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=workers, drop_last=True, generator=generator)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        return batches, lambda: None

    return start


def ours(samples: ImageSamples) -> Callable[[int, int], tuple[Iterator[Any], Callable[[], None]]]:
    """CARAML's samples through CARAML's stream."""

    def start(workers: int, seed: int) -> tuple[Iterator[Any], Callable[[], None]]:
        batches = stream(samples, BATCH, workers=workers, seed=seed)
        return batches, batches.close

    return start


def contestants(root: Path, packed: Path) -> list[Contestant]:
    """torchvision first: the others are compared with it."""
    pack_images(root, packed / "set.lmdb")
    pack_images(root, packed / "shards")
    folder = FolderStore(root)
    return [
        Contestant("torchvision, bytes", torchvision_loader(root, normalised=False)),
        Contestant("torchvision, ToTensor + Normalize", torchvision_loader(root, normalised=True)),
        Contestant("caraml, full decoding", ours(ImageSamples(folder, reduced_decoding=False))),
        Contestant("caraml, image folder", ours(ImageSamples(folder))),
        Contestant("caraml, LMDB", ours(ImageSamples(LmdbStore(packed / "set.lmdb")))),
        Contestant("caraml, tar shards", ours(ImageSamples(TarStore(packed / "shards")))),
    ]


def cpu_seconds() -> float:
    """CPU time of this process and of the workers that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime for usage in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(contestant: Contestant, workers: int, images: int, seed: int) -> tuple[float, float]:
    """Images per second of wall time, and per second of CPU time; start and end of the workers are in the CPU time only."""
    batches = max(images // BATCH, 2)
    begin_cpu = cpu_seconds()
    source, close = contestant.start(workers, seed)
    next(source)
    begin = time.monotonic()
    for _ in range(batches - 1):
        next(source)
    seconds = time.monotonic() - begin
    close()
    del source
    return (batches - 1) * BATCH / seconds, batches * BATCH / (cpu_seconds() - begin_cpu)


def compare(root: Path, workers: int, rounds: int, images: int) -> dict[str, Any]:
    """All rounds of all contestants."""
    rows: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as packed:
        field = contestants(root, Path(packed))
        for number in range(rounds):
            turned = field[number % len(field) :] + field[: number % len(field)]
            for contestant in turned:
                rows.setdefault(contestant.name, []).append(measure(contestant, workers, images, seed=number))
    base = rows[field[0].name]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "workers": workers,
        "rounds": rounds,
        "images_per_round": images,
        "folder": FolderStore(root).describe(),
        "results": {
            name: {
                "images_per_second": statistics.median(wall for wall, _ in found),
                "images_per_cpu_second": statistics.median(cpu for _, cpu in found),
                "ratio": statistics.median(wall / other for (wall, _), (other, _) in zip(found, base, strict=True)),
                "ratio_per_cpu_second": statistics.median(cpu / other for (_, cpu), (_, other) in zip(found, base, strict=True)),
                "ratio_per_cpu_second_all": sorted(round(cpu / other, 3) for (_, cpu), (_, other) in zip(found, base, strict=True)),
            }
            for name, found in rows.items()
        },
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="ROOT/CLASS/IMAGE; CARAML's drawn set if absent")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=512, help="images per contestant and round")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    torch.set_num_threads(1)  # as in a loader's worker
    found = compare(given.folder or default_image_folder(), given.workers, given.rounds, given.images)
    print(f"{'':36}{'image/s':>10}{'image/CPU s':>13}{'ratio':>8}{'per CPU s':>11}")
    for name, row in found["results"].items():
        rates = f"{row['images_per_second']:10.0f}{row['images_per_cpu_second']:13.0f}"
        print(f"{name:36}{rates}{row['ratio']:8.2f}{row['ratio_per_cpu_second']:11.2f}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
