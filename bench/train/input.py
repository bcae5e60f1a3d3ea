"""CARAML's synthetic images beside the input pipeline of the original CARAML's PyTorch script, in images per second of CPU.

    python bench/train/input.py FILE [--batch 64] [--rounds N]          FILE: its image_classification_torch.py

The script needs CUDA to train, but not to read: its own ``create_datasets`` makes the loader here, with its defaults. Packages that only
its measuring needs and that are missing are stood in for by empty modules while it is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import random
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from turns import median, ratio

from caraml.data.loader import stream
from caraml.workloads import make_torchvision_importable
from caraml.workloads.image_classification import IMAGENET_IMAGES
from caraml.workloads.image_classification.images import synthetic_images


def original(file: Path, batch: int) -> Iterator[Any]:
    """Batches of the script's training loader, epoch after epoch."""
    make_torchvision_importable()
    import torch._dynamo.utils  # looks for tabulate when it is imported, which must not be the stand-in

    missing = [name for name in ("tabulate", "jpwr", "jpwr.ctxmgr", "slugify") if importlib.util.find_spec(name.split(".")[0]) is None]
    sys.modules |= {name: MagicMock(spec=types.ModuleType, tabulate=None, get_power=None, slugify=None) for name in missing}
    spec = importlib.util.spec_from_file_location("original_caraml", file)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in missing:
        del sys.modules[name]
    sys.argv = [file.name, "--batch_size", str(batch)]
    loader, _, _ = script.create_datasets(script.parse_arguments(), torch.device("cpu"))
    return itertools.chain.from_iterable(itertools.repeat(loader))


def main() -> None:
    """Take turns, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ours = synthetic_images(1000, 224, IMAGENET_IMAGES)
    loaders = {"original": original(asked.file, asked.batch), "CARAML": stream(ours, asked.batch, workers=0)}
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(asked.rounds + 1):
        for name in random.sample(list(loaders), len(loaders)):
            begin = time.process_time()
            next(loaders[name])
            if number:
                seconds[name].append(time.process_time() - begin)
    print(f"load {os.getloadavg()[0]:.1f}; batch {asked.batch}, no loader processes; images per second of CPU")
    for name, each in seconds.items():
        print(f"{name}: {median([asked.batch / value for value in each])}")
    print(f"CARAML over original: {ratio(seconds['original'], seconds['CARAML'])}")


if __name__ == "__main__":
    main()
