"""The vision networks, BERT and the autoencoder learn; their sizes are the published ones; the knobs of large batches do what they say."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.engine.afterwards import validate
from caraml.engine.ranks import Ranks
from caraml.engine.step import make_step
from caraml.engine.steps import RankSummary, StepTable
from caraml.metrics.model import METRICS, Metric, Peak, StatedMetric, unknown
from caraml.results.rows import read_table
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Point, Policy
from caraml.worker.together import Known
from caraml.worker.training import Worker
from caraml.workloads.base import BuildContext, Quality, Task
from caraml.workloads.image_classification import Params as ImageParams
from caraml.workloads.image_classification.packed import pack_images
from caraml.workloads.image_classification.store import FolderStore, generate_image_folder
from caraml.workloads.image_classification.training import _network, flops_per_image, goyal_rate
from caraml.workloads.image_compression import Params as CompressionParams
from caraml.workloads.image_compression.training import image_quality
from caraml.workloads.question_answering import Params as QuestionParams
from caraml.workloads.question_answering import flops_per_item
from caraml.workloads.question_answering.data import generate_squad
from tests.conftest import MakePoint
from tests.stores import write_script
from tests.tasks import built

CPU = torch.device("cpu")
SMALL = {"model": "test_resnet", "image_size": 32, "classes": 4, "learning_rate": 0.05}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of tiny networks, threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 images of 4 classes."""
    root = tmp_path_factory.mktemp("images") / "set"
    generate_image_folder(root, 4, 8, seed=0)
    return root


def train(task: Task, steps: int, batch: int) -> list[float]:
    names = {"suite": "t", "benchmark": "t", "workload": "t", "params": {}, "system": "l", "device": "d", "software": "t"}
    step = make_step(task, Point(**names, device_class="cpu", global_batch=batch, micro_batch=batch), CPU)
    return [step().loss.item() for _ in range(steps)]  # type: ignore[union-attr]


def test_bert_learns_to_point_at_answers(tmp_path: Path) -> None:
    for name, texts, seed in (("train", 400, 0), ("dev", 40, 1)):
        (tmp_path / f"{name}.json").write_text(json.dumps(generate_squad(texts, seed)))
    params = {
        "preset": "tiny",
        "tokens": 40,
        "learning_rate": 3e-3,
        "file": str(tmp_path / "train.json"),
        "validation": str(tmp_path / "dev.json"),
    }
    task = built("question_answering", params, 16)
    losses = train(task, 60, 16)
    loss, right = validate(task, "fp32", CPU, Ranks())
    task.close()
    assert losses[0] == pytest.approx(3.7, abs=0.4), "a guess among 40 tokens"
    assert sum(losses[-10:]) / 10 < 0.55 * losses[0]
    assert loss is not None and right is not None and loss < 2.8 and right > 0.15
    assert task.facts.item == "item" and task.facts.data["kind"] == "squad"
    assert task.quality is not None
    task.model.eval()
    with torch.no_grad():
        quality = task.quality.measure(None)
    exact, overlap = quality["exact_match"].value, quality["f1"].value
    assert exact is not None and overlap is not None and 0.15 < exact <= overlap < 1 and quality["f1"].n == 80


@pytest.mark.parametrize("channels", [3, 4, 8])
def test_a_strided_product_over_few_channels_has_its_gradients(channels: int) -> None:
    """In channels_last oneDNN's pass for AVX2 wrote outside its buffers below eight channels: an abort, or wrong gradients."""
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Conv2d(channels, 8, 1, stride=2), torch.nn.Conv2d(8, 2, 3))
    images = torch.rand(8, channels, 28, 28)
    params = CompressionParams()
    context = BuildContext(params, CPU, 0, 1, 1, micro_batch=8, seed=0, phase=lambda _: nullcontext())
    placed = context.placed(copy.deepcopy(plain))
    for _ in range(20):
        for network, order in ((plain, torch.contiguous_format), (placed, context.memory_format)):
            network.zero_grad()
            network(images.to(memory_format=order)).square().sum().backward()
        for one, other in zip(plain.parameters(), placed.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-2)
    assert context.memory_format == torch.channels_last and placed[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_the_autoencoder_learns_to_reconstruct_digits() -> None:
    task = built("image_compression", {"width": 4, "images": 256, "held_out": 32}, 8)
    losses = train(task, 50, 8)
    loss, right = validate(task, "fp32", CPU, Ranks())
    task.close()
    assert sum(losses[-5:]) / 5 < 0.4 * losses[0]
    assert loss is not None and loss < 0.15 and right is None
    assert task.facts.epoch_items == 70_000 and task.facts.bytes_per_sample == 784


def test_the_autoencoder_compresses_fourfold_at_the_cost_of_equal_stages() -> None:
    from caraml.workloads.flops import count_flops
    from caraml.workloads.image_compression.training import CompressionAutoencoder

    with torch.device("meta"):
        model, image = CompressionAutoencoder(), torch.empty(1, 1, 28, 28)
        assert model.encode(image).numel() == 784 // 4 and model(image).shape == image.shape
        block = 2 * 2 * 9 * 64 * 64 * 784
        assert count_flops(lambda: model(image)) == pytest.approx(12 * block, rel=0.08), "twelve blocks of one cost, and little besides"


@pytest.mark.parametrize(
    ("model", "image_size", "parameters", "multiply_adds"),
    [
        ("resnet50", 224, 25_557_032, 4.09e9),
        ("efficientnet_b0", 224, 5_288_548, 0.39e9),
        ("efficientnet_b4", 380, 19_341_616, 4.39e9),
        ("mobilenetv3_small_100", 224, 2_542_856, 0.0565e9),
        ("mobilenetv3_large_100", 224, 5_483_032, 0.217e9),
        ("vit_base_patch16_224", 224, 86_567_656, 17.6e9),
    ],
)
def test_networks_have_their_published_sizes(model: str, image_size: int, parameters: int, multiply_adds: float) -> None:
    """Parameters and multiply-adds as the papers, torchvision and timm publish them."""
    params = ImageParams(model=model, image_size=image_size)
    with torch.device("meta"):
        assert sum(weight.numel() for weight in _network(params).parameters()) == parameters
    forward, both = flops_per_image(params)
    assert forward == pytest.approx(2 * multiply_adds, rel=0.05)
    assert 2.8 * forward < both < 3.1 * forward


def test_bert_base_has_its_published_size() -> None:
    from caraml.workloads.question_answering import _network as bert

    with torch.device("meta"):
        model = bert(QuestionParams())
    assert sum(weight.numel() for weight in model.parameters()) == 108_893_186, "bert-base-uncased with a span head"
    forward, both = flops_per_item(QuestionParams())
    layers = 12 * (24 * 384 * 768**2 + 4 * 384**2 * 768)
    assert forward == pytest.approx(layers, rel=0.01) and both == pytest.approx(3 * forward, rel=0.02)


@pytest.mark.parametrize(
    ("name", "data", "more"),
    [
        ("set.lmdb", "lmdb", {}),
        ("shards", "webdataset", {"passes": 2}),
        ("set.zip", "archive", {"stage": "local"}),
        ("set.lmdb", "lmdb", {"stage": "local", "validation": "set.lmdb"}),
    ],
)
def test_every_form_of_input_trains(name: str, data: str, more: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    pack_images(folder, tmp_path / name)
    more = {key: str(tmp_path / value) if key in ("stage", "validation") else value for key, value in more.items()}
    task = built("image_classification", {**SMALL, "data": data, "path": str(tmp_path / name), **more}, 8)
    losses = train(task, 3, 8)
    checked = validate(task, "fp32", CPU, Ranks())
    task.close()
    assert all(loss > 0 for loss in losses) and task.facts.samples_per_epoch == 32 * more.get("passes", 1)
    assert ("staging_seconds" in task.facts.data) == ("stage" in more)
    assert (checked[0] is None) == ("validation" not in more)


def test_damaged_images_are_counted_in_the_task(folder: Path, tmp_path: Path) -> None:
    pack_images(folder, tmp_path / "set.tar")
    with tarfile.open(tmp_path / "set.tar", "a") as archive:
        member = tarfile.TarInfo("class_0/bad.jpg")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"bad"))
    task = built("image_classification", {**SMALL, "data": "webdataset", "path": str(tmp_path / "set.tar"), "on_damaged": "skip"}, 11)
    train(task, 3, 11)
    task.close()
    assert task.damaged is not None and list(task.damaged().values()) == ["no image of a known format"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"classes": 3, "path": "SET"}, "classes: found 3; the data at .* has 4"),
        (
            {"model": "swin_tiny_patch4_window7_224", "image_size": 64, "path": "nowhere"},
            "image_size: found 64, which swin.* = 224 is its own",
        ),
        ({"bn_span": 2}, "bn_span: found 2; expected a divisor of 1 device"),
        ({"path": "SET", "validation": "OTHER"}, "validation: the classes at .* are not those"),
    ],
)
def test_what_does_not_fit_together_is_said(params: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Image.new("L", (40, 40)).save(tmp_path / "elsewhere" / "0.png")
    places = {"SET": str(folder), "OTHER": str(tmp_path)}
    with pytest.raises(InputError, match=f"(?s){message}"):
        built("image_classification", {**SMALL, **{key: places.get(str(value), value) for key, value in params.items()}}, 8)


def test_without_dali_the_error_says_what_to_install(folder: Path) -> None:
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        with pytest.raises(EnvironmentUnfitError, match="NVIDIA DALI, which is not installed"):
            built("image_classification", {**SMALL, "data": "dali", "path": str(folder)}, 8)
        return
    task = built("image_classification", {**SMALL, "data": "dali", "path": str(folder)}, 8)
    images, labels = next(task.batches)
    assert (images.dtype, images.shape, labels.shape) == (torch.uint8, (8, 3, 32, 32), (8,))
    assert len(train(task, 6, 8)) == 6


def test_dali_reads_every_image_as_often_as_asked_and_not_class_by_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dali, torch_s = MagicMock(__version__="1"), MagicMock()
    dali.pipeline_def = lambda **_: lambda pipeline: pipeline
    dali.fn.readers.file.return_value = MagicMock(), MagicMock()
    modules = {"nvidia": MagicMock(), "nvidia.dali": dali, "nvidia.dali.plugin": MagicMock(), "nvidia.dali.plugin.pytorch": torch_s}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    task = built("image_classification", {**SMALL, "data": "dali", "path": str(folder), "passes": 3}, 8)
    asked, store = dali.fn.readers.file.call_args.kwargs, FolderStore(folder)
    images = [(store.name(position), label) for position, label in enumerate(store.labels.tolist())]
    assert sorted(zip(asked["files"], asked["labels"], strict=True)) == sorted(3 * images)
    assert asked["labels"] != sorted(asked["labels"]) and task.facts.samples_per_epoch == 3 * len(images)
    with pytest.raises(InputError, match="classes"):
        built("image_classification", {**SMALL, "data": "dali", "path": str(folder), "classes": 2}, 8)
    with pytest.raises(ValidationError, match="no stage, on_damaged with data = 'dali'"):
        ImageParams.model_validate({"data": "dali", "stage": "/dev/shm", "on_damaged": "skip"})


def test_the_learning_rate_of_goyal_et_al() -> None:
    rate = goyal_rate(8192, warm_up_epochs=5, steps_per_epoch=10)
    assert [0.1 * rate(step) for step in (0, 25, 50, 299)] == pytest.approx([0.1, 1.65, 3.2, 3.2])
    assert [0.1 * rate(step) for step in (300, 600, 800)] == pytest.approx([0.32, 0.032, 0.0032])
    rate = goyal_rate(512, warm_up_epochs=1, steps_per_epoch=4)
    assert [0.1 * rate(step) for step in range(6)] == pytest.approx([0.1, 0.125, 0.15, 0.175, 0.2, 0.2])


def test_the_schedule_of_goyal_et_al_decays_no_normalisation(folder: Path) -> None:
    task = built(
        "image_classification", {**SMALL, "path": str(folder), "schedule": "goyal", "learning_rate": 0.1, "weight_decay": 1e-4}, 16
    )
    decayed, free = task.optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (1e-4, 0)
    assert all(weight.ndim > 1 for weight in decayed["params"]) and all(weight.ndim == 1 for weight in free["params"])
    train(task, 10, 16)  # five epochs of 32 images: the warm-up is over
    task.close()
    peak = 0.1 * 16 / 256
    assert decayed["lr"] == free["lr"] == pytest.approx(peak)


def test_zero_gamma_starts_blocks_as_identities() -> None:
    def last_gamma(zero: bool) -> float:
        return _network(ImageParams(model="resnet18", zero_gamma=zero)).layer1[0].bn2.weight.abs().sum().item()  # type: ignore[union-attr,index]

    assert last_gamma(True) == 0 and last_gamma(False) == 64


def test_label_smoothing_raises_the_lowest_loss(folder: Path) -> None:
    plain, smooth = (built("image_classification", {**SMALL, "path": str(folder), "label_smoothing": value}, 8) for value in (0.0, 0.1))
    certain = torch.nn.Identity()
    images, labels = next(plain.batches)
    certain.forward = lambda _: torch.nn.functional.one_hot(labels, 4).float() * 50  # type: ignore[method-assign]
    assert plain.loss(certain, [images, labels]).item() == pytest.approx(0, abs=1e-6) and smooth.loss(certain, [images, labels]).item() > 1


def test_what_a_compressed_image_is_worth() -> None:
    """Over held-out images: all of them or so many batches, the same as of the network's own output; bits by the precision."""
    task = built("image_compression", {"width": 4, "images": 64, "held_out": 24}, 8)
    assert task.quality is not None and task.validation is not None
    task.model.eval()
    with torch.no_grad():
        whole, part = task.quality.measure(None), task.quality.measure(2)
        images = torch.cat([batch.float() / 255 for batch in task.validation()])
        truth = image_quality([(task.model(images), images)])
        with torch.autocast("cpu", torch.bfloat16):
            half = task.quality.measure(1)
    assert whole.keys() == set(task.quality.names) == {*truth, "bits_per_pixel"}
    assert (whole["psnr"].n, part["psnr"].n, half["psnr"].n) == (24, 16, 8)
    assert all(whole[name].value == pytest.approx(found.value, rel=1e-4) for name, found in truth.items())
    assert whole["bits_per_pixel"].value == 4 * 7 * 7 * 32 / 28**2 == 8 and half["bits_per_pixel"].value == 4


@pytest.mark.parametrize(
    ("values", "count"), [({"measure": Policy(epochs=2, idle_seconds=0)}, 40), ({"devices": 2}, 40), ({"mode": "compute"}, None)]
)
def test_quality_goes_to_the_record(tmp_path: Path, make_point: MakePoint, values: dict[str, Any], count: int | None) -> None:
    few = Policy(target=0.5, min_seconds=0, min_steps=4, max_steps=4, idle_seconds=0, warm_up_max_seconds=0.1)
    params = CompressionParams(width=4, images=64, held_out=40).model_dump(mode="json")
    point = make_point(workload="image_compression", params=params, global_batch=16, micro_batch=8, **{"measure": few, **values})
    attempt = Store(tmp_path).new_attempt(point)
    assert subprocess.run([str(write_script(point, attempt, threads=1))], timeout=300, check=False).returncode == 0
    record = read_record(attempt / RECORD)
    for name in ("psnr", "ssim", "ms_ssim", "bits_per_pixel"):
        metric = record.metrics[name]
        assert metric.unit == METRICS[name].unit
        assert (metric.value, metric.reason) == (None, "only mode train validates and saves") if count is None else metric.value is not None
    assert record.metrics["psnr"].n == count


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError, MemoryError, AssertionError])
def test_quality_that_cannot_be_measured_has_the_reason(tmp_path: Path, make_point: MakePoint, kind: type[Exception]) -> None:
    """Its failure, whatever a workload raises, costs neither the measurement nor the loss."""
    worker = Worker(tmp_path, make_point(mode="train"))
    task = built("image_compression", {"width": 4, "images": 64, "held_out": 8}, 8)

    def fails(most: int | None) -> dict[str, Metric]:
        raise kind("no room for the windows")

    task.quality = Quality(("psnr",), fails)
    probed = Peak(value=None, dtype="fp32", reason="not probed")
    known = worker._known = Known(tmp_path, worker.point, task.facts, 0.0, "", probed, quality=unknown(["psnr"], "not yet"))
    worker._validate_and_save(task, torch.device("cpu"), RankSummary(0.0, 1.0, StepTable(), [], 0.0, 0.0, 0, []), Ranks())
    assert known.validation_loss is not None
    assert known.quality["psnr"].value is None and "no room for the windows" in (known.quality["psnr"].reason or "")


def test_a_quality_that_only_a_plug_in_has_needs_a_unit() -> None:
    stated = {"sharpness": StatedMetric(unit="1/mm", better="higher")}
    whole = Quality(("psnr", "sharpness"), lambda most: {}, stated).unknown("not yet")
    assert {name: (metric.value, metric.unit, metric.reason) for name, metric in whole.items()} == {
        "psnr": (None, "dB", "not yet"),
        "sharpness": (None, "1/mm", "not yet"),
    }
    with pytest.raises(InputError, match=r"'sharpness'.* no unit"):
        Quality(("sharpness",), lambda most: {}).unknown(None)
    with pytest.raises(InputError, match="unit 'dB' for the metric 'psnr'"):
        Quality(("psnr",), lambda most: {}, {"psnr": StatedMetric(unit="%")}).unknown(None)
    with pytest.raises(InputError, match="'throughput': CARAML measures"):
        Quality(("throughput",), lambda most: {}).unknown(None)


@pytest.mark.parametrize(("name", "unit"), [("throughput", "image/s"), ("sharpness", "1/cm"), ("blur", "1")])
def test_a_quality_gives_nothing_but_what_it_announced(name: str, unit: str) -> None:
    """A number of CARAML's own was replaced by it."""
    stated = {"sharpness": StatedMetric(unit="1/mm")}
    right = {"sharpness": Metric(value=3.0, unit="1/mm")}
    assert Quality(("sharpness",), lambda most: right, stated).measured(1) == right
    (left_out,) = Quality(("sharpness",), lambda most: {}, stated).measured(1).values()
    assert left_out.value is None and "gave no number" in str(left_out.reason)
    with pytest.raises(InputError, match="found float for 'sharpness', expected a"):
        Quality(("sharpness",), lambda most: {"sharpness": 3.0}, stated).measured(1)  # type: ignore[dict-item]
    with pytest.raises(InputError, match="measure gave NoneType"):
        Quality(("sharpness",), lambda most: None, stated).measured(1)  # type: ignore[arg-type, return-value]
    with pytest.raises(InputError, match=f"found '{name}' in '{unit}'"):
        Quality(("sharpness",), lambda most: right | {name: Metric(value=1e9, unit=unit)}, stated).measured(1)
    with pytest.raises(InputError, match=r"found 1e\+300 for 'sharpness'"):  # no reader would take the record
        Quality(("sharpness",), lambda most: {"sharpness": right["sharpness"].model_copy(update={"value": 1e300})}, stated).measured(1)


def test_epochs_go_all_the_way_to_the_record(folder: Path, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    params = ImageParams(**SMALL, path=str(folder), validation=str(folder), epoch_images=1000).model_dump(mode="json")
    point = make_point(
        workload="image_classification", params=params, global_batch=8, micro_batch=4, measure=Policy(epochs=3, idle_seconds=0.1)
    )
    attempt = Store(tmp_path).new_attempt(point)
    done = subprocess.run([str(write_script(point, attempt, threads=1))], timeout=300, check=False, env={**os.environ})
    assert done.returncode == 0, (attempt / "worker.log").read_text()
    record = read_record(attempt / RECORD)
    assert record.status == "ok" and record.window is not None and (record.window.steps, record.window.first_step) == (4, 4)
    steps = read_table(attempt / record.files["steps"])
    assert steps["epoch"] == [1] * 4 + [2] * 4 + [3] * 4 and steps["batch"] == [0, 1, 2, 3] * 3
    whole, training, checked = (record.value(f"epoch_{name}") for name in ("time", "training_time", "validation_time"))
    assert whole == pytest.approx(training + checked)  # type: ignore[operator]
    counted = sum(seconds for seconds, epoch in zip(steps["seconds"], steps["epoch"], strict=True) if epoch == 2)
    assert counted <= training * (1 + 1e-9) <= record.window.seconds * (1 + 2e-9), "on a machine however busy"  # type: ignore[operator]
    assert record.value("throughput_first_epoch") is not None and 0 <= (record.value("accuracy_validation") or 0) <= 1
    joules = record.value("energy_per_item")
    assert joules is not None and record.value("energy_per_epoch") == pytest.approx(joules * 1000 / 3600)
    assert [phase.name for phase in record.phases].count("validate") == 3
