"""Generated images resemble ImageNet's where it costs time; decoded samples are torchvision's; normalisation is arithmetic."""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from caraml.base.errors import InputError
from caraml.data.loader import stream
from caraml.workloads import make_torchvision_importable
from caraml.workloads.image_classification.decode import Box, Damaged, central_crop, decode_crop, random_crop
from caraml.workloads.image_classification.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    HeldOut,
    ImageSamples,
    normalize_images,
)
from caraml.workloads.image_classification.store import FolderStore, _draw_size, generate_image_folder
from tests.data.hostile_images import DAMAGED, WHOLE, write_hostile_folder


def digests(root: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.rglob("*.jpg"))]


def test_sizes_follow_imagenet() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([_draw_size(rng) for _ in range(20_000)])
    assert np.allclose(sizes.mean(0), (482, 415), rtol=0.03)
    landscape = (sizes == (500, 375)).all(1).mean()
    assert 0.40 < landscape < 0.45
    assert 0.13 < (sizes == (375, 500)).all(1).mean() < 0.15
    assert sizes.min() < 120
    assert sizes.max() > 1500


def test_files_weigh_what_imagenets_do_and_are_valid_jpegs(image_folder: tuple[Path, int, int]) -> None:
    root, images, size = image_folder
    files = sorted(root.rglob("*.jpg"))
    assert (images, len(files)) == (200, 200)
    assert size == sum(path.stat().st_size for path in files)
    assert 95_000 < size / images < 135_000
    shapes = set()
    for path in files:
        with Image.open(path) as image:
            image.load()
            shapes.add((image.format, image.mode))
    assert shapes == {("JPEG", "RGB")}


def test_the_same_seed_draws_the_same_images(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate_image_folder(tmp_path / name, 2, 3, seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert set(digests(tmp_path / "a")).isdisjoint(digests(tmp_path / "c"))
    assert len(set(digests(tmp_path / "a"))) == 6


def test_classes_can_be_told_apart_by_their_mean_colour(image_folder: tuple[Path, int, int]) -> None:
    samples = ImageSamples(FolderStore(image_folder[0]), 32)
    means = torch.stack([samples[i][0].float().mean((1, 2)) for i in range(len(samples))])
    labels = torch.tensor([int(label) for label in samples.store.labels])
    centres = torch.stack([means[labels == label].mean(0) for label in range(4)])
    assert (torch.cdist(means, centres).argmin(1) == labels).float().mean() > 0.8


@pytest.mark.parametrize("occupied", ["file", "folder"])
def test_nothing_is_overwritten(occupied: str, tmp_path: Path) -> None:
    root = tmp_path / "out"
    if occupied == "file":
        root.touch()
    else:
        root.mkdir()
        (root / "mine").touch()
    with pytest.raises(InputError, match="exists already"):
        generate_image_folder(root, 1, 1)
    with pytest.raises(InputError, match="at least 1"):
        generate_image_folder(tmp_path / "new", 0, 1)


def exact(path: str, box: Box, size: int) -> torch.Tensor:
    """The crop of the fully decoded image, resized by Pillow: what torchvision's own transforms compute."""
    with Image.open(path) as image:
        part = image.convert("RGB").crop((box.left, box.top, box.left + box.width, box.top + box.height))
        return torch.from_numpy(np.array(part.resize((size, size), Image.Resampling.BILINEAR))).permute(2, 0, 1)


def test_without_reduced_decoding_a_sample_is_pillows_to_a_level(image_folder: tuple[Path, int, int]) -> None:
    store = FolderStore(image_folder[0])
    for position in range(0, 200, 17):
        with Image.open(store.name(position)) as image:
            box = random_crop(random.Random(position))(*image.size)
        ours = decode_crop(store.read(position), lambda width, height, box=box: box, 64, reduced=False)
        difference = (ours.int() - exact(store.name(position), box, 64).int()).abs()
        assert difference.max() <= 1 and difference.float().mean() < 0.1
        assert (ours.dtype, ours.shape) == (torch.uint8, (3, 64, 64))


def test_with_reduced_decoding_a_sample_differs_by_little(image_folder: tuple[Path, int, int]) -> None:
    store = FolderStore(image_folder[0])
    means, reduced = [], 0
    for position in range(0, 200, 5):
        with Image.open(store.name(position)) as image:
            box = random_crop(random.Random(position))(*image.size)
        ours = decode_crop(store.read(position), lambda width, height, box=box: box, 64)
        means.append((ours.int() - exact(store.name(position), box, 64).int()).abs().float().mean().item())
        reduced += min(box.width, box.height) >= 128
    assert reduced > 25, "the reduced path was taken"
    assert np.mean(means) < 4, "levels of 255, on images full of noise"


def test_the_random_crop_has_torchvisions_distribution() -> None:
    make_torchvision_importable()
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    theirs, ours = [], []
    rng = random.Random(0)
    image = torch.empty(3, 375, 500)
    for _ in range(4000):
        top, left, height, width = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
        theirs.append((width * height / 187_500, math.log(width / height), left / 500, top / 375))
        box = random_crop(rng)(500, 375)
        assert 0 <= box.left <= 500 - box.width and 0 <= box.top <= 375 - box.height
        ours.append((box.width * box.height / 187_500, math.log(box.width / box.height), box.left / 500, box.top / 375))
    for mine, other in zip(np.array(ours).T, np.array(theirs).T, strict=True):
        # Two-sample Kolmogorov-Smirnov: 1.95 is exceeded once in a thousand times.
        together = np.sort(np.concatenate([mine, other]))
        gap = np.abs(np.searchsorted(np.sort(mine), together, "right") - np.searchsorted(np.sort(other), together, "right")).max() / 4000
        assert gap < 1.95 * math.sqrt(2 / 4000)


def test_half_of_the_samples_are_mirrored_and_validation_is_not(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    ramp = np.tile(np.linspace(0, 255, 300, dtype=np.uint8), (300, 1))
    Image.fromarray(ramp).save(tmp_path / "c" / "ramp.png")
    samples = ImageSamples(FolderStore(tmp_path), 32)
    slopes = [samples[draw][0].float().diff(dim=-1).mean().item() for draw in range(400)]
    assert 150 < sum(slope < 0 for slope in slopes) < 250
    central = ImageSamples(FolderStore(tmp_path), 32, augmented=False)
    assert torch.equal(central[0][0], central[1][0]) and central[0][0].float().diff(dim=-1).mean() > 0


def test_samples_are_functions_of_seed_epoch_and_position(image_folder: tuple[Path, int, int]) -> None:
    samples, others = ImageSamples(FolderStore(image_folder[0]), 32, seed=1), ImageSamples(FolderStore(image_folder[0]), 32, seed=2)
    assert torch.equal(samples[7][0], samples[7][0])
    assert not torch.equal(samples[7][0], samples[207][0]), "the same image, an epoch later"
    assert not torch.equal(samples[7][0], others[7][0])
    twice = ImageSamples(FolderStore(image_folder[0]), 32, passes=13)
    assert len(twice) == 2600 and twice[207][1] == samples[7][1] and not torch.equal(twice[207][0], twice[7][0])


def test_every_kind_of_whole_image_is_read(tmp_path: Path) -> None:
    root = write_hostile_folder(tmp_path / "set")
    samples = ImageSamples(FolderStore(root), 32)
    good = [position for position in range(len(samples)) if Path(samples.store.name(position)).name in WHOLE]
    assert len(good) == len(WHOLE)
    for position in good:
        image, label = samples[position]
        assert (image.shape, label) == ((3, 32, 32), 0) and image.float().std() > 1
    grey = next(position for position in good if samples.store.name(position).endswith("grey.jpg"))
    assert torch.equal(samples[grey][0][0], samples[grey][0][2])


@pytest.mark.processes
def test_damaged_files_are_fatal_by_name_or_skipped_and_counted(tmp_path: Path) -> None:
    root = write_hostile_folder(tmp_path / "set")
    samples = ImageSamples(FolderStore(root), 32)
    for position in range(len(samples)):
        if (name := Path(samples.store.name(position)).name) in DAMAGED:
            with pytest.raises(InputError, match=rf"{name}: not readable"):
                samples[position]
    for workers in (0, 1):
        skipping = ImageSamples(FolderStore(root), 32, on_damaged="skip")
        with stream(skipping, 6, workers=workers) as batches:
            shapes = {tuple(next(batches)[0].shape) for _ in range(4)}
        assert shapes == {(6, 3, 32, 32)}
        assert {Path(name).name for name in skipping.damaged} == set(DAMAGED)
        assert all(skipping.damaged.values())


def test_nothing_but_damage_ends_instead_of_searching_for_ever(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for number in range(3):
        (tmp_path / "c" / f"{number}.jpg").write_text("no")
    with pytest.raises(InputError, match="nor the 2 before it"):
        ImageSamples(FolderStore(tmp_path), 32, on_damaged="skip")[0]


def test_a_header_that_asks_for_gigabytes_is_refused() -> None:
    bomb = io.BytesIO()
    Image.new("L", (1, 1)).save(bomb, "JPEG")
    data = bytearray(bomb.getvalue())
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = b"\xff\xdc\xff\xdc"
    with pytest.raises(Damaged, match="65500 x 65500"):
        decode_crop(bytes(data), central_crop, 32)


@pytest.mark.processes
def test_held_out_images_are_gone_through_once_by_all_ranks(image_folder: tuple[Path, int, int]) -> None:
    samples = ImageSamples(FolderStore(image_folder[0]), 32, augmented=False)
    for workers in (0, 1):
        held_out = HeldOut(samples, 16, torch.device("cpu"), workers)
        labels = [torch.cat([labels for _, labels in held_out.share(rank, 3)]) for rank in range(3)]
        again = torch.cat([labels for _, labels in held_out])
        held_out.close()
        assert [len(part) for part in labels] == [67, 67, 66]
        assert torch.cat(labels).bincount().tolist() == again.bincount().tolist() == [50] * 4


def test_what_is_wrong_with_a_folder_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no image folder"):
        ImageSamples(FolderStore(tmp_path / "gone"))
    with pytest.raises(InputError, match="found no folder of a class"):
        ImageSamples(FolderStore(tmp_path))
    (tmp_path / "a").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "a" / "0.png")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "readme.txt").touch()
    with pytest.raises(InputError, match="class b has no image"):
        ImageSamples(FolderStore(tmp_path))


def test_provenance_counts_the_files(image_folder: tuple[Path, int, int]) -> None:
    root, _, size = image_folder
    described = ImageSamples(FolderStore(root)).describe()
    assert (described["kind"], described["items"], described["classes"]) == ("images", 200, 4)
    assert (described["bytes"], described["bytes_from"]) == (size, "all files")
    assert described["generated"]["seed"] == 1
    json.dumps(described)


def test_normalising_is_the_textbook_formula() -> None:
    batch = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = batch.clone()
    normal = normalize_images(batch)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    expected = (batch.double() / 255 - mean) / std
    assert normal.dtype == torch.float32
    assert normal.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(normal.double(), expected, atol=1e-5)
    assert torch.equal(batch, before)
