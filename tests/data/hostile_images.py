"""An image folder as it is met in the wild: grey-scale, CMYK and huge files, truncated ones, and files that are no image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

WHOLE = ("large.jpg", "grey.jpg", "cmyk.jpg", "palette.png", "odd.JPEG", "trailing.jpg", "thin.jpg")
DAMAGED = ("truncated.jpg", "header.jpg", "text.jpg", "empty.jpg")


def write_hostile_folder(root: Path) -> Path:
    """Two classes: ``good`` holds :data:`WHOLE`, ``mixed`` one good file and :data:`DAMAGED`. Returns ``root``."""
    good, mixed = root / "good", root / "mixed"
    good.mkdir(parents=True)
    mixed.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (350, 400, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((400, 350))
    image.resize((2600, 2100)).save(good / "large.jpg", quality=70)
    image.convert("L").save(good / "grey.jpg")
    image.convert("CMYK").save(good / "cmyk.jpg")
    image.convert("P").save(good / "palette.png")
    image.save(good / "odd.JPEG", "PNG")  # ImageNet has one, too
    image.resize((400, 3)).save(good / "thin.jpg")
    image.save(mixed / "whole.jpg")
    whole = (mixed / "whole.jpg").read_bytes()
    (good / "trailing.jpg").write_bytes(whole + b"bytes after the end")
    (mixed / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (mixed / "header.jpg").write_bytes(whole[:20])
    (mixed / "text.jpg").write_text("not an image")
    (mixed / "empty.jpg").touch()
    return root
