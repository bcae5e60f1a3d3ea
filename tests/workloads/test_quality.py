"""Fidelity of images and answers, against values worked out by hand or by loops over pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from caraml.metrics.run import mean
from caraml.workloads.image_compression.training import SCALE_WEIGHTS, image_quality, psnr, similarity
from caraml.workloads.question_answering import answer_quality, f1, normalized


def images(side: int, count: int = 2, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up images and noisy copies of them."""
    generator = torch.Generator().manual_seed(3)
    truth = torch.rand(count, channels, side, side, generator=generator, dtype=torch.float64)
    truth = torch.nn.functional.avg_pool2d(truth, 5, 1, 2)
    return (truth + 0.1 * torch.randn(truth.shape, generator=generator, dtype=torch.float64)).clamp(0, 1), truth


def by_loops(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Mean SSIM and mean contrast-structure of two images (H, W), one window after the other, from the formulas of Wang et al."""
    weight = np.array([[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5**2)) for j in range(11)] for i in range(11)])
    weight /= weight.sum()
    whole, structure = [], []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
            mean_a, mean_b = (weight * a).sum(), (weight * b).sum()
            var_a, var_b = (weight * (a - mean_a) ** 2).sum(), (weight * (b - mean_b) ** 2).sum()
            cov = (weight * (a - mean_a) * (b - mean_b)).sum()
            structure.append((2 * cov + 0.03**2) / (var_a + var_b + 0.03**2))
            whole.append(structure[-1] * (2 * mean_a * mean_b + 0.01**2) / (mean_a**2 + mean_b**2 + 0.01**2))
    return float(np.mean(whole)), float(np.mean(structure))


def halved(x: np.ndarray) -> np.ndarray:
    return np.array([[x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean() for j in range(x.shape[1] // 2)] for i in range(x.shape[0] // 2)])


def test_psnr_of_a_known_error() -> None:
    """An error of a tenth of the range everywhere is 20 dB; of 1 level of 255 it is 20 lg 255 = 48.13 dB; half the pixels gain 3.01 dB."""
    truth = torch.full((3, 1, 4, 4), 0.5, dtype=torch.float64)
    found = truth + torch.tensor([0.1, 1 / 255, 0.1]).double().view(3, 1, 1, 1)
    found[2, :, :2] = truth[2, :, :2]
    assert psnr(found, truth).tolist() == pytest.approx([20.0, 48.1308, 23.0103], abs=1e-4)
    assert math.isinf(psnr(truth, truth)[0])


@pytest.mark.parametrize(("side", "scales"), [(11, 1), (28, 2), (44, 3)])
def test_structural_similarity_is_that_of_the_formulas(side: int, scales: int) -> None:
    found, truth = images(side)
    single, multiple, number = similarity(found, truth)
    assert number == scales
    for index in range(2):
        x, y = found[index, 0].numpy(), truth[index, 0].numpy()
        assert single[index].item() == pytest.approx(by_loops(x, y)[0], rel=1e-9)
        product = 1.0
        for scale in range(scales):
            whole, structure = by_loops(x, y)
            product *= (whole if scale == scales - 1 else structure) ** (SCALE_WEIGHTS[scale] / sum(SCALE_WEIGHTS[:scales]))
            x, y = halved(x), halved(y)
        assert multiple[index].item() == pytest.approx(product, rel=1e-9)


def test_all_five_scales_need_176_pixels() -> None:
    assert sum(SCALE_WEIGHTS) == pytest.approx(1, abs=1e-4)
    assert [similarity(*images(side, 1))[2] for side in (175, 176, 400)] == [4, 5, 5]


def test_identities_of_structural_similarity() -> None:
    """An image is like itself; two flat ones differ in luminance only, which counts at the coarsest scale; a negative is unlike."""
    found, truth = images(28)
    assert torch.stack(similarity(truth, truth)[:2]).flatten().tolist() == pytest.approx([1.0] * 4, abs=1e-12)
    flat, other = torch.full((1, 1, 28, 28), 0.4).double(), torch.full((1, 1, 28, 28), 0.8).double()
    luminance = (2 * 0.4 * 0.8 + 1e-4) / (0.4**2 + 0.8**2 + 1e-4)
    single, multiple, _ = similarity(flat, other)
    assert single.item() == pytest.approx(luminance, rel=1e-9)
    assert multiple.item() == pytest.approx(luminance ** (0.2856 / (0.0448 + 0.2856)), rel=1e-9)
    single, multiple, _ = similarity(1 - truth, truth)
    assert (single < 0).all() and (multiple == 0).all()
    one, two = similarity(found, truth)[0], similarity(truth, found)[0]
    assert torch.equal(one, two)


def test_colours_are_compared_each_by_itself() -> None:
    found, truth = images(28, channels=3)
    whole = similarity(found, truth)[0]
    each = torch.stack([similarity(found[:, [c]], truth[:, [c]])[0] for c in range(3)]).mean(0)
    assert whole.tolist() == pytest.approx(each.tolist(), rel=1e-12)


def test_means_over_images_whatever_the_batches() -> None:
    found, truth = images(28, 5)
    whole, parts = image_quality([(found, truth)]), image_quality([(found[:2], truth[:2]), (found[2:], truth[2:])])
    for name in ("psnr", "ssim", "ms_ssim"):
        assert whole[name].value == pytest.approx(parts[name].value) and whole[name].n == parts[name].n == 5
        low, high = whole[name].low, whole[name].high
        assert low is not None and high is not None and low < (whole[name].value or 0) < high
    assert whole["psnr"].unit == "dB" and whole["ms_ssim"].scope == "2 of 5 scales"
    assert whole["psnr"].value == pytest.approx(psnr(found, truth).mean().item())


def test_what_is_no_number_is_null_with_a_reason() -> None:
    _, truth = images(28)
    exact = image_quality([(truth, truth)])
    assert exact["psnr"].value is None and "exactly" in (exact["psnr"].reason or "") and exact["ssim"].value == pytest.approx(1)
    assert mean("f1", []).value is None and mean("f1", []).reason == "no sample was held out"
    assert mean("f1", [0.5]).low is None and mean("f1", [0.5]).value == 0.5
    one = mean("psnr", [20.0, 21.0, 21.0, 20.0])
    assert one.high == pytest.approx(20.5 + 3.18245 * math.sqrt(1 / 3) / 2, rel=1e-5)  # Student's t for 3 degrees
    assert mean("psnr", [20.0, 20.0]).low is None, "no spread, and no certainty from that"
    assert (exact["ssim"].low, mean("ssim", [1.0, 1.0]).low, mean("ms_ssim", [0.0, 0.0]).high) == (None, None, None), "nor are these shares"


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 10, 0.0179, 0.4042), (15, 148, 0.0624, 0.1605)],
)
def test_the_interval_of_a_share_is_wilson_s(right: int, of: int, low: float, high: float) -> None:
    """The last are the values that Newcombe (1998, table I) gives, the others follow from the formula; none leaves 0 to 1."""
    found = mean("exact_match", [1.0] * right + [0.0] * (of - right))
    assert found.value == right / of and (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The Cat's  pyjamas!", "cats pyjamas"),
        ("an AN a the THE", ""),
        ("theatre, another", "theatre another"),
        ("U.S.A.", "usa"),
        ("a-priori", "apriori"),  # punctuation goes first, so the article is none any more
        ("“the” moon", "“ ” moon"),  # only ASCII punctuation goes
        ("  10,000\tmen\n", "10000 men"),
        ("", ""),
    ],
)
def test_answers_are_normalized_as_squad_does(text: str, plain: str) -> None:
    assert normalized(text) == plain


@pytest.mark.parametrize(
    ("found", "truth", "value"),
    [
        ("the cat sat", "cat sat", 1.0),
        ("cat sat down", "cat sat", 0.8),  # precision 2/3, recall 1
        ("cat cat", "cat", 2 / 3),  # the second is not in the truth: precision 1/2, recall 1
        ("cat cat dog", "cat dog dog cat", 6 / 7),
        ("dog", "cat", 0.0),
        ("", "", 1.0),
        ("the", "", 1.0),
        ("cat", "", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_overlap_of_words(found: str, truth: str, value: float) -> None:
    assert f1(found, truth) == pytest.approx(value)


def test_the_best_of_the_given_answers_counts_and_no_answer_is_one() -> None:
    cases: list[tuple[str, Sequence[str]]] = [
        ("Denver Broncos", ["The Denver Broncos", "Broncos"]),  # exact
        ("in Oslo", ["Oslo", "the city of Oslo"]),  # no match; 2/3 is better than 2/5
        ("", []),  # rightly no answer
        ("Oslo", []),  # an answer where there is none
        ("", ["Oslo"]),
        ("a", ["the", "Oslo"]),  # a given answer of articles only is left out, so this is none
    ]
    metrics = answer_quality(cases)
    assert metrics["exact_match"].value == pytest.approx(2 / 6) and metrics["exact_match"].n == 6
    assert metrics["f1"].value == pytest.approx((1 + 2 / 3 + 1) / 6)
