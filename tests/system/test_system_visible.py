"""Which devices the environment leaves: as CUDA's and ROCm's documentation has it, for sensors and detection alike."""

from __future__ import annotations

import pytest

from caraml.system.files import CUDA, ROCM, Masks, let_through

FOUR = [(f"GPU-{letter * 8}", f"0000:{number}1:00.0") for number, letter in enumerate("abcd")]


@pytest.mark.parametrize(
    ("masks", "environ", "places"),
    [
        (CUDA, {}, [0, 1, 2, 3]),
        (CUDA, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, [1]),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "1,1,3"}, [1, 3]),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "GPU-c, 00000000:31:00.0"}, [2, 3]),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "GPU-,0"}, []),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "4"}, []),
        (CUDA, {"HIP_VISIBLE_DEVICES": "0"}, [0, 1, 2, 3]),
        (ROCM, {"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        (ROCM, {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, [2]),
        (ROCM, {"ROCR_VISIBLE_DEVICES": "3,1,0", "HIP_VISIBLE_DEVICES": "1,2"}, [1, 0]),
        (ROCM, {"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "3"}, []),
    ],
)
def test_masks_hide_what_the_runtimes_hide(masks: Masks, environ: dict[str, str], places: list[int]) -> None:
    assert let_through(FOUR, masks, environ) == places


def test_a_beginning_of_two_uuids_names_neither() -> None:
    alike = [("GPU-aa1",), ("GPU-aa2",)]
    assert let_through(alike, CUDA, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}) == []
    assert let_through(alike, CUDA, {"CUDA_VISIBLE_DEVICES": "GPU-aa2"}) == [1]
