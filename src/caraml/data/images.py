"""Images from a folder to the device: decode, crop and flip in the loader's workers, normalise where the model is."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from caraml.compat import make_torchvision_importable
from caraml.data.image_generator import FACTS_FILE, default_image_folder, generate_image_folder
from caraml.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ImageFolderSamples", "default_image_folder", "generate_image_folder", "image_folder_dataset", "normalize_images"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training images per channel (red, green, blue), levels from 0 to 1; torchvision's reference values."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation to :data:`IMAGENET_MEAN`."""
_SIZED_EXACTLY = 1000
"""Files whose sizes are asked for; of more, as many at even distances. Asking for a million takes minutes on a parallel file system."""


class ImageFolderSamples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The samples of ``<root>/<class>/<image>``: a random crop of random size and shape, resized, perhaps mirrored.

    The crop is chosen before the image is decoded. Where it is at least twice as large as the result, the JPEG is decoded
    at a half, a quarter or an eighth of its size straight from its cosine transform, which skips most of the work.
    """

    def __init__(self, root: Path, size: int = 224, *, reduced_decoding: bool = True) -> None:
        """List the images below ``root``.

        Args:
            root: a folder with one folder per class.
            size: height and width of a sample in pixels.
            reduced_decoding: allow decoding at reduced size; off, the pixels are torchvision's exactly.

        Raises:
            InputError: if there is no such folder, or no image in one of its classes.
        """
        make_torchvision_importable()
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        self.root = Path(root)
        self.size = size
        self.reduced_decoding = reduced_decoding
        try:
            folder = ImageFolder(str(root))
        except OSError as error:
            raise InputError(
                f"{root}: no image folder ({error})", "expected ROOT/CLASS/IMAGE; `caraml data prepare images` writes one"
            ) from error
        self.classes: list[str] = folder.classes
        self.samples: list[tuple[str, int]] = folder.samples
        self._crop = v2.RandomResizedCrop(size)
        self._finish = v2.Compose([v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __len__(self) -> int:
        """The number of images."""
        return len(self.samples)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        """Sample ``position``: uint8 (3, size, size) and its class.

        Raises:
            InputError: if the file is damaged or gone.
        """
        from PIL import Image

        path, label = self.samples[position]
        try:
            with Image.open(path) as image:
                cropped = self._decode(image)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow raises for a damaged file
            raise InputError(f"{path}: not readable as an image: {error}") from error
        return self._finish(cropped), label

    def _decode(self, image: Image.Image) -> Image.Image:
        """The resized crop of an image of which only the header has been read."""
        from PIL import Image

        crop = self._crop.make_params([image])
        width = image.width
        fit = min(crop["width"], crop["height"]) // self.size
        if self.reduced_decoding and fit >= 2:
            image.draft("RGB", (image.width // fit, image.height // fit))
        scale = image.width / width
        left, top = round(crop["left"] * scale), round(crop["top"] * scale)
        right, bottom = round((crop["left"] + crop["width"]) * scale), round((crop["top"] + crop["height"]) * scale)
        part = image.crop((left, top, right, bottom))
        return (part if part.mode == "RGB" else part.convert("RGB")).resize((self.size, self.size), Image.Resampling.BILINEAR)

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind, path, images, classes, bytes and how they were found, sample size."""
        facts_path = self.root / FACTS_FILE
        chosen = self.samples[:: max(1, len(self.samples) // _SIZED_EXACTLY)]
        mean = sum(Path(path).stat().st_size for path, _ in chosen) / len(chosen)
        return {
            "kind": "images",
            "path": str(self.root),
            "items": len(self.samples),
            "classes": len(self.classes),
            "bytes": round(mean * len(self.samples)),
            "bytes_from": "all files" if len(chosen) == len(self.samples) else f"the mean of {len(chosen)} files",
            "size": self.size,
            "generated": json.loads(facts_path.read_text(encoding="utf-8")) if facts_path.is_file() else None,
        }


def image_folder_dataset(root: Path, size: int = 224) -> ImageFolderSamples:
    """The training samples of an image folder: uint8 (3, ``size``, ``size``) and class, for ``caraml.data.loader.stream``."""
    return ImageFolderSamples(root, size)


def normalize_images(
    batch: torch.Tensor, dtype: torch.dtype = torch.float32, memory_format: torch.memory_format = torch.channels_last
) -> torch.Tensor:
    """Bring images to ImageNet's mean 0 and standard deviation 1 on the device that they are on.

    Args:
        batch: uint8 (B, 3, H, W), levels from 0 to 255. As bytes, a batch crosses to the device in a quarter of the time.
        dtype: of the result; the arithmetic is float32.
        memory_format: of the result.

    Returns:
        ``(batch / 255 - mean) / std``, shape (B, 3, H, W).
    """
    shift, factor = _normalisation(batch.device)
    return batch.to(torch.float32, memory_format=memory_format).sub_(shift).mul_(factor).to(dtype)


@functools.lru_cache(maxsize=16)
def _normalisation(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``255 mean`` and ``1 / (255 std)``, each (1, 3, 1, 1). Kept, because copying them anew would synchronise every step."""
    mean = torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1)
    std = torch.tensor(IMAGENET_STD).view(1, 3, 1, 1)
    return (255 * mean).to(device), (1 / (255 * std)).to(device)
