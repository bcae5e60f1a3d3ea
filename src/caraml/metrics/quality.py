"""How good what a trained model gives is, on held-out data: images by fidelity and rate, answers to questions by SQuAD's rules."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from caraml.base.stats import t_critical
from caraml.metrics.model import Metric, MetricDefinition

if TYPE_CHECKING:
    import torch

WINDOW, SIGMA = 11, 1.5
"""Side and standard deviation of the Gaussian in which images are compared [pixels]: Wang et al. 2004, section III B."""
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""Of MS-SSIM's five scales, the finest first: Wang et al. 2003, section 3.2."""
_K1, _K2 = 0.01, 0.03
_Z = 1.959964
"""Quantile of the normal distribution for 95 %."""

_judged = partial(
    MetricDefinition,
    source="held-out data after the last step: 16 batches at most, all of it in a run by epochs; the interval is that of the sample",
)

DEFINITIONS: dict[str, MetricDefinition] = {
    "psnr": _judged(
        "PSNR",
        "dB",
        "higher",
        "Peak signal-to-noise ratio of reconstructed images, mean over images: 10 lg(1 / mean squared error) for levels from 0 to 1.",
    ),
    "ssim": _judged(
        "SSIM",
        "1",
        "higher",
        "Structural similarity of reconstructed images (Wang et al. 2004), mean over images and the places of a Gaussian window of 11 x 11 "
        "pixels.",
    ),
    "ms_ssim": _judged(
        "MS-SSIM",
        "1",
        "higher",
        "Structural similarity over several scales (Wang et al. 2003), mean over images. Of the five scales those are taken at which the "
        "window fits into the image, with their weights scaled to a sum of 1; 28 x 28 pixels have two.",
    ),
    "bits_per_pixel": MetricDefinition(
        "Bits per pixel",
        "bit/pixel",
        "lower",
        "Bits of what is stored of an image over its pixels. The network has neither quantisation nor entropy model, so what is stored are "
        "its bottleneck's numbers, each with the bits that the precision gives it.",
    ),
    "exact_match": _judged(
        "Exact match",
        "1",
        "higher",
        "Share of held-out questions whose answer is, but for case, punctuation, articles and white space, one of the given ones (SQuAD).",
        shown="percent",
    ),
    "f1": _judged(
        "F1",
        "1",
        "higher",
        "Harmonic mean of precision and recall of an answer's words against the nearest of the given answers, mean over questions (SQuAD).",
        shown="percent",
    ),
}


def mean(name: str, values: Sequence[float], **more: Any) -> Metric:
    """The metric ``name`` as the mean over held-out samples, with the 95 % interval of that sample: Student's, and Wilson's for a share.

    Samples that are all alike have no spread that would tell how others are: then Student's is not known.
    """
    unit = DEFINITIONS[name].unit
    if not values or not all(map(math.isfinite, values)):
        reason = "an image was reproduced exactly or not at all, which is no finite number" if values else "no sample was held out"
        return Metric(value=None, unit=unit, reason=reason)
    value, n = fmean(values), len(values)
    centre, half = value, t_critical(0.975, n - 1) * stdev(values) / math.sqrt(n) if n > 1 else 0.0
    if DEFINITIONS[name].shown == "percent" and set(values) <= {0.0, 1.0}:  # Wilson 1927: holds for shares near 0 and 1, too
        weight = _Z**2 / n
        centre, half = (value + weight / 2) / (1 + weight), math.sqrt(weight * (value * (1 - value) + weight / 4)) / (1 + weight)
    ends = {"low": centre - half, "high": centre + half} if half else {}
    return Metric(value=value, unit=unit, n=n, **ends, **more)


# -- images ------------------------------------------------------------------------------------------------------------


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
    from torch.nn import functional as F

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
    import torch
    from torch.nn import functional as F

    line = torch.exp(-((torch.arange(WINDOW, dtype=x.dtype) - WINDOW // 2) ** 2) / (2 * SIGMA**2))
    window = torch.outer(line, line) / line.sum() ** 2

    def local(image: torch.Tensor) -> torch.Tensor:
        return F.conv2d(image.flatten(0, 1).unsqueeze(1), window[None, None]).unflatten(0, image.shape[:2])

    mean_x, mean_y = local(x), local(y)
    var_x, var_y, cov = local(x * x) - mean_x**2, local(y * y) - mean_y**2, local(x * y) - mean_x * mean_y
    structure = (2 * cov + _K2**2) / (var_x + var_y + _K2**2)
    luminance = (2 * mean_x * mean_y + _K1**2) / (mean_x**2 + mean_y**2 + _K1**2)
    return (luminance * structure).flatten(1).mean(1), structure.flatten(1).mean(1)


# -- answers: the rules of SQuAD's evaluation script, version 2.0 (Rajpurkar et al. 2016, 2018) ------------------------------


def answer_quality(answers: Iterable[tuple[str, Sequence[str]]]) -> dict[str, Metric]:
    """Exact match and F1 over pairs of an answer and the given ones, the best of which counts. No answer is the empty text, and none given
    means that it is right."""
    exact, overlap = [], []
    for found, given in answers:
        truths = [truth for truth in given if normalized(truth)] or [""]
        exact.append(max(float(normalized(found) == normalized(truth)) for truth in truths))
        overlap.append(max(f1(found, truth) for truth in truths))
    return {"exact_match": mean("exact_match", exact), "f1": mean("f1", overlap)}


def normalized(answer: str) -> str:
    """In lower case, without ASCII punctuation and English articles, words one space apart."""
    plain = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def f1(found: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words, each as often as it occurs; without a word on one side, whether both have none."""
    words, true_words = normalized(found).split(), normalized(truth).split()
    if not words or not true_words:
        return float(words == true_words)
    common = (Counter(words) & Counter(true_words)).total()
    return 2 * common / (len(words) + len(true_words))
