"""A torchvision that cannot load its operators must not take anything else down; imports stay light where promised."""

from __future__ import annotations

from collections.abc import Callable


def test_what_a_broken_torchvision_breaks_works_in_a_fresh_interpreter(run_python: Callable[..., str]) -> None:
    printed = run_python(
        "from caraml.workloads import make_torchvision_importable, _declared\n"
        "make_torchvision_importable(); first = list(_declared); make_torchvision_importable()\n"
        "assert _declared == first and len(first) <= 1\n"
        "import torchvision.transforms.v2, timm\n"
        "from transformers import GPT2LMHeadModel\n"
        "print(timm.is_model('resnet50'), GPT2LMHeadModel.__name__)\n"
    )
    assert printed.split() == ["True", "GPT2LMHeadModel"]


def test_preparing_and_reading_text_need_no_torch(run_python: Callable[..., str]) -> None:
    printed = run_python(
        "import sys\n"
        "import caraml.workloads.gpt.text, caraml.workloads.gpt.tokens, caraml.data.store\n"
        "import caraml.workloads.image_classification.store\n"
        "print(*[name for name in ('torch', 'torchvision', 'tokenizers', 'duckdb', 'PIL') if name in sys.modules])\n"
    )
    assert printed.strip() == ""
