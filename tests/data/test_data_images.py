"""Generated images resemble ImageNet's where it costs time; decoded samples are torchvision's; normalisation is arithmetic."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from caraml.compat import make_torchvision_importable
from caraml.data.image_generator import ImageFolderFacts, _draw_size, generate_image_folder
from caraml.data.images import IMAGENET_MEAN, IMAGENET_STD, ImageFolderSamples, image_folder_dataset, normalize_images
from caraml.errors import InputError


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


def test_files_weigh_what_imagenets_do_and_are_valid_jpegs(image_folder: tuple[Path, ImageFolderFacts]) -> None:
    root, facts = image_folder
    files = sorted(root.rglob("*.jpg"))
    assert (facts.classes, facts.images, len(files)) == (4, 200, 200)
    assert facts.bytes == sum(path.stat().st_size for path in files)
    assert 95_000 < facts.bytes / facts.images < 135_000
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


def test_classes_can_be_told_apart_by_their_mean_colour(image_folder: tuple[Path, ImageFolderFacts]) -> None:
    samples = image_folder_dataset(image_folder[0], 32)
    means = torch.stack([samples[i][0].float().mean((1, 2)) for i in range(len(samples))])
    labels = torch.tensor([label for _, label in samples.samples])
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


def reference(path: str, size: int) -> torch.Tensor:
    """The sample by torchvision's own transforms on the fully decoded image."""
    make_torchvision_importable()
    from torchvision.transforms import v2

    with Image.open(path) as image:
        transform = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        return transform(image.convert("RGB"))


def test_without_reduced_decoding_a_sample_is_torchvisions_to_the_bit(image_folder: tuple[Path, ImageFolderFacts]) -> None:
    samples = ImageFolderSamples(image_folder[0], 64, reduced_decoding=False)
    for position in range(0, 200, 17):
        torch.manual_seed(position)
        ours, label = samples[position]
        torch.manual_seed(position)
        assert torch.equal(ours, reference(samples.samples[position][0], 64))
        assert (ours.dtype, ours.shape, label) == (torch.uint8, (3, 64, 64), position // 50)


def test_with_reduced_decoding_a_sample_differs_by_little(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    y, x = np.mgrid[0:1200, 0:1600]
    smooth = np.stack([127 + 100 * np.sin(x / 90), 127 + 100 * np.cos(y / 70), 127 + 100 * np.sin((x + y) / 110)], -1)
    Image.fromarray(smooth.astype(np.uint8)).save(tmp_path / "only" / "large.jpg", quality=95)
    samples = ImageFolderSamples(tmp_path, 64)
    for seed in range(10):
        torch.manual_seed(seed)
        ours = samples[0][0]
        torch.manual_seed(seed)
        difference = (ours.int() - reference(samples.samples[0][0], 64).int()).abs().float()
        assert difference.mean() < 4
        assert difference.max() < 20


def test_grey_images_become_colour_and_damaged_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    Image.new("L", (300, 200), 77).save(tmp_path / "c" / "0.png")
    (tmp_path / "c" / "1.jpg").write_bytes(b"\xff\xd8\xff no image")
    Image.effect_noise((300, 200), 50).save(tmp_path / "c" / "2.jpg")
    (tmp_path / "c" / "2.jpg").write_bytes((tmp_path / "c" / "2.jpg").read_bytes()[:2000])
    samples = image_folder_dataset(tmp_path, 32)
    assert torch.equal(samples[0][0], torch.full((3, 32, 32), 77, dtype=torch.uint8))
    for position in (1, 2):
        with pytest.raises(InputError, match=rf"{position}\.jpg: not readable"):
            samples[position]
    with pytest.raises(InputError, match="no image folder"):
        image_folder_dataset(tmp_path / "gone")


def test_provenance_counts_the_files(image_folder: tuple[Path, ImageFolderFacts]) -> None:
    root, facts = image_folder
    described = image_folder_dataset(root).describe()
    assert (described["kind"], described["items"], described["classes"]) == ("images", 200, 4)
    assert (described["bytes"], described["bytes_from"]) == (facts.bytes, "all files")
    assert described["generated"]["seed"] == 1
    json.dumps(described)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_normalising_is_the_textbook_formula(dtype: torch.dtype, tolerance: float) -> None:
    batch = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = batch.clone()
    normal = normalize_images(batch, dtype, torch.channels_last)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    expected = (batch.double() / 255 - mean) / std
    assert normal.dtype == dtype
    assert normal.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(normal.double(), expected, atol=tolerance)
    assert torch.equal(batch, before)
