"""Which arithmetic and which kernels a step uses. Weights and optimizer state stay in fp32; bf16 and fp16 are autocast around them, but for
weights that only serve forward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend
from torch.nn.utils.fusion import fuse_conv_bn_eval

from caraml.base.errors import EnvironmentUnfitError
from caraml.engine.device import gpu_lacks
from caraml.suite.model import Attention, Compile, Point, Precision
from caraml.system import host
from caraml.system.families import family_of
from caraml.system.model import UNITS, DType

ARITHMETIC: dict[Precision, DType] = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
"""Peak figure that the utilisation of each precision is compared with."""

HALF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What autocast computes in."""
_PRODUCTS = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}
"""Modules whose weights autocast casts on every call. Classes derived from them may do something else with a weight first."""
_FOLDED = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_TILE = 16
"""Sides that fp8 products take are multiples of this."""


_INSTEAD = {"tf32": "ask for fp32", "bf16": "ask for fp16 or fp32, or set emulated = true", "fp8": "ask for bf16"}
"""Next step where a GPU lacks a precision."""


def check_fit(point: Point, device: torch.device) -> None:
    """Raise ``EnvironmentUnfitError`` where the device cannot compute as a point asks."""
    check_precision(point.precision, device, point.knobs.emulated)
    if point.cuda_graphs:
        check_graphs(point.compile, device)


def set_kernels(point: Point) -> None:
    """Let torch take the arithmetic and the kernels that a point asks for."""
    set_matmul_precision(point.precision)
    set_deterministic(point.deterministic, point.knobs.convolution_search)
    set_attention(point.knobs.attention, whole=point.placement.cp == 1)


def check_precision(precision: Precision, device: torch.device, emulated: bool = False) -> None:
    """Raise ``EnvironmentUnfitError`` for a precision that the device lacks: it would be measured in another one, or while it emulates
    one, unless it is asked to (``emulated``)."""
    if device.type == "cpu":
        if precision in (cpu := host.cpu()).emulates and not emulated:
            needed = " or ".join(UNITS[ARITHMETIC[precision]])
            found = f"precision: found {precision!r}, which this {cpu.model} only emulates, without {needed}"
            raise EnvironmentUnfitError(found, "ask for fp32, or set emulated = true")
        return
    family = family_of(device.type)
    if ARITHMETIC[precision] not in family.arithmetic:
        raise EnvironmentUnfitError(f"precision: found {precision!r}, which {device.type} devices lack", "ask for fp32 or bf16")
    if device.type == "cuda" and not emulated and (lacking := gpu_lacks(precision, device)) is not None:
        raise EnvironmentUnfitError(f"precision: found {precision!r}, but {lacking}", _INSTEAD[precision])
    if precision == "fp8" and find_spec("torchao") is None:
        raise EnvironmentUnfitError("precision: found 'fp8', which needs the package torchao", "pip install 'caraml[fp8]', or ask for bf16")
    if precision in HALF and not torch.amp.is_autocast_available(device.type):
        raise EnvironmentUnfitError(f"precision: found {precision!r}; torch has no autocast for {device.type} devices", "ask for fp32")


def compute_in_fp8(model: nn.Module, **options: Any) -> None:
    """Have the linear layers of a model's blocks multiply in fp8, forward and backward, each tensor scaled by its largest number; where a
    side is no multiple of 16, a layer stays as it is. Parameters stay the same objects, in fp32. ``options`` go to torchao."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def chosen(module: nn.Module, name: str) -> bool:
        return (
            name.startswith("blocks.") and isinstance(module, nn.Linear) and module.in_features % _TILE == module.out_features % _TILE == 0
        )

    convert_to_float8_training(model, config=Float8LinearConfig(**options), module_filter_fn=chosen)


def check_graphs(compiled: Compile, device: torch.device) -> None:
    """Raise ``EnvironmentUnfitError`` for a way to compile that replays graphs (``compiled``), on an accelerator that has none of CUDA's:
    torch would leave them out without a word."""
    if device.type not in ("cpu", "cuda"):
        found = f"compile: found {compiled!r}, which replays CUDA graphs; {device.type} devices have none"
        raise EnvironmentUnfitError(found, 'ask for compile = "default" or "max-autotune-no-cudagraphs"')


def set_matmul_precision(precision: Precision) -> None:
    """Allow TF32 in matrix products and convolutions exactly when the point asks for it, so that `fp32` means fp32 on every GPU."""
    allowed = precision != "fp32"
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def set_deterministic(wanted: bool, search: bool = True) -> None:
    """Let torch choose algorithms that give the same bits every time; where an operation has none, it raises and names it. Otherwise
    ``search`` times all algorithms of a convolution on its first call; the fastest may be another one the next time."""
    if wanted != torch.are_deterministic_algorithms_enabled():  # the call loads torch's compiler: seconds of every start
        torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = wanted, search and not wanted


def set_attention(kernel: Attention, *, whole: bool = True) -> None:
    """Let torch take only this kernel for attention, on every device; where it has none for the shapes, the step raises. Of sequences that
    are not ``whole``, torch gives cuDNN none. A compiled model then does not come from the disk as another choice left it there: torch
    (2.13, too) finds what autograd's compiler made by the model alone."""
    switches = {
        "flash": torch.backends.cuda.enable_flash_sdp,
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    for name, switch in switches.items():
        switch(kernel in ("auto", name) and (whole or name != "cudnn"))
    if kernel != "auto" or not whole:
        from torch._functorch import config

        config.enable_autograd_cache = False


def attention_kernel(asked: Attention, shape: tuple[int, int, int], precision: Precision, device: torch.device) -> dict[str, str]:
    """What computes causal attention of this many heads, tokens and numbers per head: the answer of torch's own choice, for a record."""
    heads, tokens, width = shape
    operand = torch.empty(1, heads, tokens, width, device=device, dtype=HALF.get(precision), requires_grad=True)
    try:
        taken = SDPBackend(torch._fused_sdp_choice(operand, operand, operand, is_causal=True)).name
    except (RuntimeError, ValueError) as error:  # devices of plug-ins need not answer
        return {"asked": asked, "kernel": "unknown", "why": str(error).splitlines()[0]}
    return {"asked": asked, "kernel": taken.removesuffix("_ATTENTION").lower()}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    dtype = HALF.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def freeze(model: nn.Module, precision: Precision) -> tuple[nn.Module, dict[str, Any]]:
    """A model in evaluation mode for forward passes only, and what a record says of it. The given model is used up.

    Folded layers give the same numbers up to rounding, and cast weights the same bits, because autocast would cast them in every step.
    """
    told: dict[str, Any] = {"folded": 0}
    if any(type(module) in _FOLDED.values() for module in model.modules()):
        try:
            model, told["folded"] = _without_norms(model)
        except Exception as error:  # noqa: BLE001 -- a network that cannot be traced may raise anything, and runs as it is
            told["why_none_folded"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    half = HALF.get(precision)
    if half is not None:
        for module in model.modules():
            if type(module) in _PRODUCTS:
                for name, weight in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(weight.detach().to(half), requires_grad=False))
    told["weights"] = "float32" if half is None else str(half).removeprefix("torch.")
    return model, told


def _without_norms(model: nn.Module) -> tuple[nn.Module, int]:
    """The model with each batch normalisation in the convolution before it, where nothing else sees that one's result; and how many."""
    graph = fx.Tracer().trace(model)
    modules, uses = dict(model.named_modules()), dict[str, int]()
    for node in graph.nodes:
        if node.op == "call_module":
            uses[str(node.target)] = uses.get(str(node.target), 0) + 1
    folded = 0
    for node in list(graph.nodes):
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        last, first = str(node.target), str(before.target)
        norm, convolution = modules[last], modules[first]
        once = uses[last] == uses[first] == 1
        if not once or _FOLDED.get(type(convolution)) is not type(norm) or norm.running_mean is None:
            continue
        parent, _, name = first.rpartition(".")
        setattr(model.get_submodule(parent), name, fuse_conv_bn_eval(convolution, norm))
        node.replace_all_uses_with(before)
        graph.erase_node(node)
        folded += 1
    return fx.GraphModule(model, graph), folded
