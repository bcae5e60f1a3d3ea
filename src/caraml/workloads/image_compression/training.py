"""28 x 28 images of digits, and the image compression model of the PEARC '22 study: an autoencoder of residual blocks with one bottleneck.

The paper (section 3.4) gives its parts ("residual blocks and one bottleneck", "in essence similar to ResNet50", reconstruction of MNIST)
and no layers, so the layers are our choice, made to follow its words and to be checked at a glance:

* Encoder: a 3 x 3 convolution, then three stages of two residual blocks each, at 28 x 28, 14 x 14 and 7 x 7 pixels with 64, 128 and 256
  channels: ResNet's rule that channels double where the side halves, so that every block costs the same. Blocks are ResNet's basic ones:
  two 3 x 3 convolutions with batch normalisation and a shortcut, which is a 1 x 1 convolution where the shape changes.
* Bottleneck: a 1 x 1 convolution to 4 channels. What is stored of an image is 4 x 7 x 7 = 196 numbers for its 784 pixels. The paper's
  real codec quantises several bottlenecks; this one, as the paper's simplification, has one and quantises nothing.
* Decoder: the encoder's mirror, each stage doubling the side by nearest neighbour; a 3 x 3 convolution and a sigmoid give the pixels.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.base.files import making
from caraml.base.limits import DIGITS, too_large
from caraml.base.packed import unpacking
from caraml.data.store import prepared_once
from caraml.metrics.model import Metric, unit_of
from caraml.metrics.run import mean
from caraml.workloads.base import BuildContext, Quality, Task, counted_facts, given_path, open_source
from caraml.workloads.flops import forward_and_training_flops
from caraml.workloads.image_compression import Params

SIDE = 28
"""Height and width of an image in pixels."""
_VERSION = 1
_IMAGES_MAGIC = 2051
_PARTS = {False: "train-images-idx3-ubyte", True: "t10k-images-idx3-ubyte"}


class Digits(torch.utils.data.Dataset[torch.Tensor]):
    """Grey images as uint8 (1, 28, 28), from an array (N, 28, 28)."""

    def __init__(self, images: npt.NDArray[np.uint8], origin: dict[str, Any]) -> None:
        self._images, self._origin = images, origin

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self._images[position])).unsqueeze(0)

    def __getitems__(self, positions: Sequence[int]) -> torch.Tensor:
        """A batch (B, 1, 28, 28), cut out of the array at once."""
        return torch.from_numpy(self._images[np.asarray(positions)]).unsqueeze(1)

    @staticmethod
    def collate(batch: Any) -> Any:
        return batch

    def describe(self) -> dict[str, Any]:
        return {"kind": "digits", "items": len(self), "bytes": self._images.nbytes, **self._origin}


def mnist(folder: Path, held_out: bool = False) -> Digits:
    """The images of MNIST's idx file in ``folder``, compressed or not. Raises ``InputError`` if there is no such file, or it is not one of
    28 x 28 images."""
    name = _PARTS[held_out]
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise InputError(f"{folder}: found neither {name} nor {name}.gz", "leave `folder` out to use drawn digits")
    try:
        with unpacking(path) as file:
            data = bytearray()  # piece by piece, so that it is in memory once
            while len(data) <= DIGITS and (piece := file.read(1 << 20)):
                data += piece
        if len(data) > DIGITS:
            raise too_large(path, len(data), DIGITS)
        magic, count, height, width = struct.unpack_from(">4i", data)
    except struct.error as error:
        raise InputError(f"{path}: not readable as an idx file: {error}") from error
    size = len(data) - 16
    if (magic, height, width) != (_IMAGES_MAGIC, SIDE, SIDE) or size != count * SIDE * SIDE:
        expected = f"magic {_IMAGES_MAGIC}, N x {SIDE} x {SIDE} images"
        raise InputError(f"{path}: found magic {magic}, {count} x {height} x {width} and {size} bytes; expected {expected}")
    return Digits(np.frombuffer(data, np.uint8, offset=16).reshape(count, SIDE, SIDE), {"path": str(path)})


def drawn_digits(images: int, held_out: bool = False) -> Digits:
    """Digits of the font that comes with Pillow, each moved, turned and scaled at random; drawn on first use, found again later."""
    import PIL

    seed = 1 if held_out else 0
    key = {"kind": "digits", "version": _VERSION, "images": images, "seed": seed, "pillow": PIL.__version__, "numpy": np.__version__}

    def build_images(folder: Path) -> None:
        with making(folder / "images.npy") as file:
            np.save(file, _draw(images, seed))

    folder = prepared_once(key, build_images)
    return Digits(np.load(folder / "images.npy", mmap_mode="r"), {"path": str(folder), "drawn": True})


def _draw(images: int, seed: int) -> npt.NDArray[np.uint8]:
    from PIL import Image, ImageDraw, ImageFont

    large = 4 * SIDE
    glyphs = []
    for digit in range(10):
        glyph = Image.new("L", (large, large))
        ImageDraw.Draw(glyph).text((large // 2, large // 2), str(digit), fill=255, font=ImageFont.load_default(96), anchor="mm")
        glyphs.append(glyph)
    rng = np.random.default_rng(seed)
    out = np.empty((images, SIDE, SIDE), dtype=np.uint8)
    for number in range(images):
        angle, zoom = rng.normal(0, 0.15), rng.uniform(3.2, 4.6)
        right, down = rng.uniform(-2.5, 2.5, 2)
        cos, sin, half = zoom * math.cos(angle), zoom * math.sin(angle), SIDE / 2
        # Where a pixel of the small image lies in the large one: turned about the centre, `zoom` large pixels apart.
        x, y = half + right, half + down
        affine = (cos, -sin, large / 2 - cos * x + sin * y, sin, cos, large / 2 - sin * x - cos * y)
        out[number] = np.asarray(glyphs[number % 10].transform((SIDE, SIDE), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR))
    return out[rng.permutation(images)]


BLOCKS = 2
"""Residual blocks per stage, as in ResNet-18."""


class ResidualBlock(nn.Module):
    """He et al. 2015, figure 5 left: ``relu(shortcut(x) + f(x))``, f two 3 x 3 convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class CompressionAutoencoder(nn.Module):
    """Reconstructs a (B, 1, 28, 28) image, levels from 0 to 1, through ``bottleneck`` channels of 7 x 7."""

    def __init__(self, width: int = 64, bottleneck: int = 4) -> None:
        """``width``: channels at 28 x 28; two and four times as many at 14 x 14 and 7 x 7."""
        super().__init__()
        wide, wider = 2 * width, 4 * width
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *_stage(width, width),
            *_stage(width, wide, stride=2),  # (B, 2 width, 14, 14)
            *_stage(wide, wider, stride=2),  # (B, 4 width, 7, 7)
            nn.Conv2d(wider, bottleneck, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(bottleneck, wider, 1),
            *_stage(wider, wider),
            nn.Upsample(scale_factor=2),  # (B, 4 width, 14, 14)
            *_stage(wider, wide),
            nn.Upsample(scale_factor=2),  # (B, 2 width, 28, 28)
            *_stage(wide, width),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """What is stored: (B, bottleneck, 7, 7)."""
        return cast(torch.Tensor, self.encoder(images))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 1, 28, 28) to (B, 1, 28, 28)."""
        return torch.sigmoid(self.decoder(self.encode(images)))


def _stage(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [ResidualBlock(inputs, outputs, stride), *(ResidualBlock(outputs, outputs) for _ in range(BLOCKS - 1))]


def build(ctx: BuildContext[Params]) -> Task:
    """Build the autoencoder, Adam, and the stream of uint8 (B, 1, 28, 28)."""
    params = ctx.params
    with ctx.phase("data"):
        if params.folder is not None:
            digits, unseen = (mnist(given_path(params.folder), held_out) for held_out in (False, True))
        else:
            digits, unseen = drawn_digits(params.images), drawn_digits(params.held_out, held_out=True)
        source = open_source(digits, ctx, workers=params.workers, resident=params.data == "resident")
    torch.manual_seed(ctx.seed)
    model = CompressionAutoencoder(params.width, params.bottleneck)
    ctx.placed(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate, fused=ctx.fused)
    with torch.device("meta"):
        twin = CompressionAutoencoder(params.width, params.bottleneck)
        flops = forward_and_training_flops(lambda: twin(torch.empty(2, 1, SIDE, SIDE)).sum(), 2)
    facts = counted_facts("image", model, source, flops, bytes_per_sample=SIDE * SIDE, epoch_items=params.epoch_images)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        images = batch.float().div_(255)
        return F.mse_loss(net(images).float(), images)

    def validation() -> Any:
        size = ctx.micro_batch
        return (unseen.__getitems__(range(first, min(first + size, len(unseen)))).to(ctx.device) for first in range(0, len(unseen), size))

    def quality(most: int | None) -> dict[str, Metric]:
        """Of the reconstructions as they are, between 0 and 1 and not rounded to 256 levels; and the rate."""
        scaled = [batch.float().div_(255) for batch in itertools.islice(validation(), most)]
        stored = model.encode(scaled[0])
        bits = 8 * stored.element_size() * stored[0].numel() / scaled[0][0].numel()
        rate = Metric(value=bits, unit=unit_of("bits_per_pixel"))
        return {**image_quality((model(images), images) for images in scaled), "bits_per_pixel": rate}

    own = Quality(("psnr", "ssim", "ms_ssim", "bits_per_pixel"), quality)
    source = replace(source, validation=validation)
    return source.task(model, optimizer, loss, facts, predict=lambda net, batch: net(batch.float().div_(255)), quality=own)


# -- fidelity -----------------------------------------------------------------------------------------------------------

WINDOW, SIGMA = 11, 1.5
"""Side and standard deviation of the Gaussian in which images are compared [pixels]: Wang et al. 2004, section III B."""
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""Of MS-SSIM's five scales, the finest first: Wang et al. 2003, section 3.2."""
_K1, _K2 = 0.01, 0.03


def image_quality(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Metric]:
    """PSNR, SSIM and MS-SSIM over batches of reconstructed and true images (B, C, H, W), levels from 0 to 1."""
    found: dict[str, list[float]] = {"psnr": [], "ssim": [], "ms_ssim": []}
    scales = 0
    for pair in pairs:
        images, truth = (batch.cpu().double() for batch in pair)  # squares of small differences need the digits
        single, multiple, scales = similarity(images, truth)
        found["psnr"] += psnr(images, truth).tolist()
        found["ssim"] += single.tolist()
        found["ms_ssim"] += multiple.tolist()
    scope = {"ms_ssim": {"scope": f"{scales} of {len(SCALE_WEIGHTS)} scales"}}
    return {name: mean(name, values, **scope.get(name, {})) for name, values in found.items()}


def psnr(images: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of each image [dB], (B,); infinite for one that is its truth."""
    return -10 * (images - truth).square().flatten(1).mean(1).log10()


def similarity(images: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """SSIM and MS-SSIM of each image, (B,), and the number of scales that MS-SSIM has here. The shorter side has 11 pixels or more.

    MS-SSIM is the product, over scales of half the side each, of the mean contrast and structure term to the power of the scale's weight;
    the coarsest has the luminance term, too. A negative mean, of an image unlike its truth, counts as 0.
    """
    fitting = int(math.log2(min(truth.shape[-2:]) / WINDOW)) + 1
    weights = SCALE_WEIGHTS[:fitting]
    single, multiple = None, truth.new_ones(len(truth))
    for number, weight in enumerate(weights, start=1):
        whole, structure = _compared(images, truth)
        single = whole if single is None else single
        multiple = multiple * (whole if number == len(weights) else structure).clamp(min=0) ** (weight / sum(weights))
        images, truth = F.avg_pool2d(images, 2), F.avg_pool2d(truth, 2)
    assert single is not None
    return single, multiple, len(weights)


def _compared(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over all places of the window of SSIM, and of its contrast and structure term alone; (B,) each."""
    line = torch.exp(-((torch.arange(WINDOW, dtype=x.dtype) - WINDOW // 2) ** 2) / (2 * SIGMA**2))
    window = torch.outer(line, line) / line.sum() ** 2

    def local(image: torch.Tensor) -> torch.Tensor:
        return F.conv2d(image.flatten(0, 1).unsqueeze(1), window[None, None]).unflatten(0, image.shape[:2])

    mean_x, mean_y = local(x), local(y)
    var_x, var_y, cov = local(x * x) - mean_x**2, local(y * y) - mean_y**2, local(x * y) - mean_x * mean_y
    structure = (2 * cov + _K2**2) / (var_x + var_y + _K2**2)
    luminance = (2 * mean_x * mean_y + _K1**2) / (mean_x**2 + mean_y**2 + _K1**2)
    return (luminance * structure).flatten(1).mean(1), structure.flatten(1).mean(1)
