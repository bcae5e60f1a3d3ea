"""One program: CARAML's step as its worker makes it, or a peer's own code, found where the caller says.

    python contestants.py '{"peer": "nanogpt", ...}'       (started by compare.py)

A peer's script or loop is run as it is; only its arguments are chosen. What the gate times is therefore theirs.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gate
import numpy as np
import torch
from spec import Spec, point_of, step_of

ENDLESS = 10**9
RESIDENT = 4
"""Batches of images that a loop over images is fed with, in turn."""


def nanogpt(spec: Spec) -> None:
    """``train.py`` of nanoGPT with the flags that its README gives for a CPU, on random tokens in its own file format."""
    assert spec.path is not None
    params, folder = spec.params, Path(spec.scratch)
    data = folder / "data" / "random"
    data.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(params["vocab_size"], size=2**20, dtype=np.uint16)
    for part in ("train", "val"):
        tokens.tofile(data / f"{part}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": params["vocab_size"]}))
    options = {
        "device": spec.device,
        "compile": spec.compile,
        "dtype": "bfloat16" if spec.precision == "bf16" else "float32",
        "dataset": "random",
        "out_dir": "out",
        "eval_iters": 1,
        "eval_interval": ENDLESS,
        "gradient_accumulation_steps": 1,
        "batch_size": spec.batch,
        "block_size": params["sequence_length"],
        "n_layer": params["layers"],
        "n_head": params["heads"],
        "n_embd": params["width"],
    }
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in options.items())]
    sys.path.insert(0, spec.path)
    import os

    os.environ["PYTHONPATH"] = spec.path
    os.chdir(folder)
    Path("configurator.py").write_bytes((Path(spec.path) / "configurator.py").read_bytes())  # it is read from the current folder
    runpy.run_path(str(Path(spec.path) / "train.py"), run_name="__main__")


class _RandomText(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples as ``Trainer`` wants them; labels are the inputs, which the model shifts itself, or where an answer begins and ends."""

    def __init__(self, vocabulary: int, length: int, answers: bool = False) -> None:
        self._tokens = torch.randint(vocabulary, (512, length), generator=torch.Generator().manual_seed(0))
        self._answers = answers

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index % len(self._tokens)]
        if self._answers:
            first = tokens[0] % (len(tokens) - 1)
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "start_positions": first, "end_positions": first + 1}
        return {"input_ids": tokens, "labels": tokens}


def trainer(spec: Spec) -> None:
    """Hugging Face's ``Trainer`` with its defaults: its GPT-2 without dropout, as the others are, or its BERT with, as in CARAML."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    from transformers import Trainer, TrainingArguments

    params = spec.params
    arguments = TrainingArguments(
        output_dir=spec.scratch,
        per_device_train_batch_size=spec.batch,
        max_steps=ENDLESS,
        use_cpu=spec.device == "cpu",
        bf16=spec.precision == "bf16",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        torch_compile=spec.compile,
        weight_decay=0.1,
        max_grad_norm=1.0,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # it would give each of a machine's GPUs as many samples, and take them all
    if spec.workload == "gpt":
        Trainer(_gpt2(params), arguments, train_dataset=_RandomText(params["vocab_size"], params["sequence_length"])).train()
        return
    network = _bert()
    Trainer(network, arguments, train_dataset=_RandomText(network.config.vocab_size, params["tokens"], answers=True)).train()


def _gpt2(params: dict[str, Any]) -> Any:
    """GPT-2 of the library ``transformers``, of these sizes and without dropout."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=params["vocab_size"],
        n_positions=params["sequence_length"],
        n_embd=params["width"],
        n_layer=params["layers"],
        n_head=params["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _bert() -> Any:
    """BERT base of the library ``transformers``, with a head for answers."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    from transformers import BertConfig, BertForQuestionAnswering

    return BertForQuestionAnswering(BertConfig())  # BERT base is its default


def optimum(spec: Spec) -> None:
    """Training scenario of optimum-benchmark, its launcher ``inline``, on a model in a local folder: nothing is fetched."""
    assert spec.path is not None
    sys.path.insert(0, spec.path)  # it needs another transformers than CARAML's
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    from optimum_benchmark import Benchmark, BenchmarkConfig, InlineConfig, PyTorchConfig, TrainingConfig

    params, model = spec.params, str(Path(spec.scratch) / "model")
    _gpt2(params).save_pretrained(model)
    arguments = {"per_device_train_batch_size": spec.batch, "weight_decay": 0.1, "max_grad_norm": 1.0, "disable_tqdm": True}
    scenario = TrainingConfig(
        max_steps=ENDLESS,
        warmup_steps=1,
        dataset_shapes={"dataset_size": 512, "sequence_length": params["sequence_length"]},
        training_arguments=arguments,
        memory=False,
    )
    backend = PyTorchConfig(model=model, task="text-generation", library="transformers", model_type="gpt2", device="cpu")
    Benchmark.launch(BenchmarkConfig("beside", backend, scenario, InlineConfig(device_isolation=False)))


class _Images:
    """A loader whose batches are in memory: float images and classes, without end."""

    def __init__(self, spec: Spec) -> None:
        generator, size = torch.Generator().manual_seed(0), spec.params["image_size"]
        shape = (spec.batch, 3, size, size)
        self._batches = [
            tuple(
                part.to(spec.device)
                for part in (torch.randn(shape, generator=generator), torch.randint(1000, shape[:1], generator=generator))
            )
            for _ in range(RESIDENT)
        ]

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return itertools.cycle(self._batches)


def timm(spec: Spec) -> None:
    """``train_one_epoch`` of timm's ``train.py`` with that script's own defaults: model, optimizer, task."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    assert spec.path is not None
    sys.argv = ["train.py", "--model", spec.params["model"], *(["--channels-last"] if spec.channels_last else [])]
    script = _imported(Path(spec.path))
    args, _ = script._parse_args()
    args.prefetcher = args.distributed = False
    args.rank, args.local_rank, args.world_size = 0, 0, 1
    device = torch.device(spec.device)
    model = script.create_model(args.model, num_classes=1000).to(device)
    if spec.channels_last:
        model = model.to(memory_format=torch.channels_last)
    task = script.ClassificationTask(model, torch.nn.CrossEntropyLoss(), device=device, verbose=False)
    if spec.compile:
        model.compile()
    optimizer = script.create_optimizer_v2(model, **script.optimizer_kwargs(cfg=args))
    loader = _Images(spec)
    script.train_one_epoch(0, model, loader, optimizer, args, task=task, device=device, amp_autocast=lambda: in_precision(spec))


def torchvision(spec: Spec) -> None:
    """``train_one_epoch`` of torchvision's ``references/classification/train.py`` with that script's own defaults."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    from torchvision import models

    assert spec.path is not None
    script = _imported(Path(spec.path))
    args = script.get_args_parser().parse_args(["--device", spec.device])
    args.channels_last = spec.channels_last
    model = models.get_model(spec.params["model"]).to(spec.device)
    if spec.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if spec.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    loader = _Images(spec)
    scaler = torch.amp.GradScaler(spec.device) if spec.precision == "bf16" else None  # its --amp, which is in fp16
    script.train_one_epoch(model, torch.nn.CrossEntropyLoss(), optimizer, loader, torch.device(spec.device), 0, args, scaler=scaler)


def plain(spec: Spec) -> None:
    """A network of a library, in the loop that its tutorials show: where there is no checkout of the library's own script."""
    model, loader = image_network(spec), iter(_Images(spec))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    while True:
        images, labels = next(loader)
        if spec.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with in_precision(spec):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def in_precision(spec: Spec) -> AbstractContextManager[object]:
    """Autocast, if the program shall have it."""
    return torch.autocast(spec.device, dtype=torch.bfloat16, enabled=spec.precision == "bf16")


def image_network(spec: Spec) -> Any:
    """The network of the library that ``path`` names, on the device, compiled if asked."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    name, library = spec.params["model"], importlib.import_module(spec.path or "timm")
    model = library.create_model(name, num_classes=1000) if spec.path == "timm" else library.models.get_model(name)
    model = model.to(spec.device, memory_format=torch.channels_last if spec.channels_last else torch.contiguous_format)
    if spec.compile:
        model.compile()
    return model


def forward_passes(spec: Spec) -> Callable[[], object]:
    """A step of CARAML, or a forward pass of a peer's network as its documentation has it: evaluation mode, no gradients."""
    if spec.peer == "caraml":
        return step_of(point_of(spec))
    if spec.workload == "image_classification":
        model, loader = image_network(spec).eval(), iter(_Images(spec))

        def scores() -> object:
            images, _ = next(loader)
            return model(images.contiguous(memory_format=torch.channels_last) if spec.channels_last else images)

        return _without_gradients(spec, scores)
    if spec.workload == "question_answering":
        network, shape = _bert(), (spec.batch, spec.params["tokens"])
        named = {"input_ids": torch.randint(network.config.vocab_size, shape).to(spec.device)}
        named["attention_mask"] = torch.ones_like(named["input_ids"])
        return _without_gradients(spec, _ready(network, spec), **named)
    tokens = torch.randint(spec.params["vocab_size"], (spec.batch, spec.params["sequence_length"])).to(spec.device)
    if spec.peer != "nanogpt":
        return _without_gradients(spec, _ready(_gpt2(spec.params), spec), tokens, labels=tokens, use_cache=False)
    theirs = _imported(Path(spec.path or "", "model.py"))
    sizes = {ours: spec.params[name] for ours, name in (("n_layer", "layers"), ("n_head", "heads"), ("n_embd", "width"))}
    config = theirs.GPTConfig(block_size=tokens.shape[1], vocab_size=spec.params["vocab_size"], dropout=0.0, **sizes)
    return _without_gradients(spec, _ready(theirs.GPT(config), spec), tokens, tokens)


def _ready(network: Any, spec: Spec) -> Any:
    """The network on the device, in evaluation mode, compiled if asked."""
    network = network.to(spec.device).eval()
    if spec.compile:
        network.compile()
    return network


def _without_gradients(spec: Spec, work: Callable[..., object], *inputs: Any, **named: Any) -> Callable[[], object]:
    def once() -> object:
        with torch.inference_mode(), in_precision(spec):
            return work(*inputs, **named)

    return once


def _imported(file: Path) -> Any:
    """A script as a module, with its neighbours importable."""
    sys.path.insert(0, str(file.parent))
    return importlib.import_module(file.stem)


PEERS: dict[str, Callable[[Spec], None]] = {
    "nanogpt": nanogpt,
    "trainer": trainer,
    "optimum": optimum,
    "timm": timm,
    "torchvision": torchvision,
    "plain": plain,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", help="as JSON")
    asked = Spec(**json.loads(parser.parse_args().spec))
    by_hand = asked.inference or asked.peer == "caraml"
    held = gate.install(by_hook=not by_hand)
    if asked.peer != "caraml" and asked.workload == "image_classification":
        torch.backends.cudnn.benchmark = True  # as the scripts of timm and torchvision begin, and as CARAML's step does
    if not by_hand:
        PEERS[asked.peer](asked)
    step = forward_passes(asked)
    while True:
        step()
        held()
