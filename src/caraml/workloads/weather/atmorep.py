"""Cubes of temperature and wind cut into tokens, some of them masked, from NetCDF files with the axes of AtmoRep's data, and a transformer
over several fields of the atmosphere, trained to fill in the masked tokens by an ensemble of predictions.

After AtmoRep (Lessig et al., arXiv 2308.13280) with the settings of its public code of 2024 for temperature and wind: 383,556,480
parameters. B samples; per field N tokens (levels x time x latitude x longitude), each of P values and of width D.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from caraml.base.errors import InputError
from caraml.workloads.base import BuildContext, Task, counted_facts
from caraml.workloads.flops import forward_and_training_flops
from caraml.workloads.weather import AtmoRepParams, open_input
from caraml.workloads.weather.netcdf import Layout, NetcdfFiles, find_files, write_netcdf
from caraml.workloads.weather.samples import Split, WeatherSamples, smooth, split_files, without_gaps

SAMPLES_WITHOUT_FILES = 100_000
"""Samples in an epoch of random data; AtmoRep's own number is a parameter of its runs, not of the data."""
FIELDS = ("velocity_u", "velocity_v", "temperature")
LEVELS = (96, 105, 114, 123, 137)
LAYOUT = Layout(
    {
        "data": ("time", "field", "level", "lat", "lon"),
        "mean": ("field", "level"),
        "std": ("field", "level"),
        "lats": ("lat",),
        "lons": ("lon",),
        "levels": ("level",),
    },
    {"field": len(FIELDS)},
)
TOKEN_FACTS = 8
"""What a token tells of its place: year, day, hour, level, latitude, longitude, level again as a share, resolution."""
_MASKED_SHARE = 0.25
"""Of the tokens of each level. AtmoRep draws it from 0 to 0.5 for each sample; its mean makes every step the same work."""
_ZEROED, _NOISED, _COARSENED = 0.9, 0.2, 0.05
"""Chances that a masked token is set to 0, disturbed by noise, replaced by its mean; drawn independently."""
LOOKALIKE = {"tiny": (3, 12, 2, 24, 24), "small": (2, 72, 5, 54, 108)}
"""Files, hours in each, levels, rows, columns."""

Shape = tuple[int, int, int]
FieldSample = dict[str, torch.Tensor]


class AtmosphereSamples(WeatherSamples):
    """A sample is, per field, ``{tokens (N, P), facts (N, 8), masked (M,), truth (M, P)}``: a cube at a random time and place.

    Tokens at ``masked`` are disturbed, ``truth`` has them as they were. An epoch has a cube for each hour at which one can begin.
    """

    application = "atmorep"

    def __init__(self, folder: Path, config: AtmoRepConfig, split: Split = "train") -> None:
        """Open ``folder/*.nc``; of several files the last is for validation. Raises ``InputError`` as :class:`NetcdfFiles`; also for fewer
        levels than the network has; a file smaller than a cube."""
        self.files = NetcdfFiles(split_files(find_files(folder, "*.nc"), split), LAYOUT)
        self._config, levels = config, config.levels
        extents = {name: tuple(a * b for a, b in zip(field.tokens, field.size, strict=True)) for name, field in config.fields.items()}
        if len(set(extents.values())) > 1:
            raise InputError(f"the fields' cubes differ: {extents}; expected one extent")
        self.cube = extents[FIELDS[0]]
        for path, found in zip(self.files.paths, self.files.lengths, strict=True):
            have = (found["time"], found["lat"], found["lon"])
            if any(a < b for a, b in zip(have, self.cube, strict=True)) or found["level"] < levels:
                needed = f"{' x '.join(map(str, self.cube))} on {levels} levels"
                raise InputError(f"{path}: found {' x '.join(map(str, have))} on {found['level']} levels; expected at least {needed}")
        self._scales = [tuple(self.files.read(number, key) for key in ("mean", "std")) for number in range(len(self.files.paths))]
        self._axes = [{key: self.files.read(number, key) for key in ("lats", "lons", "levels")} for number in range(len(self.files.paths))]
        self.files.close()
        self.ends = list(itertools.accumulate(found["time"] - self.cube[0] + 1 for found in self.files.lengths))

    def __getitem__(self, position: int) -> Any:
        """Sample ``position``: a cube that begins at this hour, at a place and with a mask by torch's random numbers."""
        number, hour = self.place(position)
        lengths, (hours, rows, columns) = self.files.lengths[number], self.cube
        top, left = (int(torch.randint(lengths[key] - size + 1, ())) for key, size in (("lat", rows), ("lon", columns)))
        fields, levels = self._config.fields, self._config.levels
        where = (slice(hour, hour + hours), slice(0, len(FIELDS)), slice(0, levels))
        cube = self.files.read(number, "data", (*where, slice(top, top + rows), slice(left, left + columns)))  # (T, F, L, Y, X)
        mean, std = (scale[None, :, :levels, None, None] for scale in self._scales[number])
        cube = without_gaps((cube - mean) / std)
        return {
            name: masked_tokens(
                cut(torch.from_numpy(np.ascontiguousarray(cube[:, index])), fields[name].size),
                self._facts(number, fields[name], hour, top, left),
                levels,
            )
            for index, name in enumerate(FIELDS)
        }

    def _facts(self, number: int, field: FieldConfig, hour: int, top: int, left: int) -> torch.Tensor:
        """(N, 8): year, day, hour, level, latitude, longitude, level as a share, resolution; all about 1 or less."""
        axes, (dt, dy, dx) = self._axes[number], field.size
        level, t, y, x = np.meshgrid(*map(np.arange, (self._config.levels, *field.tokens)), indexing="ij")
        at = hour + t * dt + dt // 2
        latitude, longitude = axes["lats"][top + y * dy + dy // 2], axes["lons"][left + x * dx + dx // 2]
        spacing = np.full(level.shape, abs(float(axes["lats"][1] - axes["lats"][0])))
        levels = axes["levels"][level] / LEVELS[-1]
        facts = (np.full(level.shape, number / 50), at / 8766, at % 24 / 24, levels, latitude / 90, longitude / 360, level / 5, spacing)
        return torch.from_numpy(np.stack([fact.reshape(-1) for fact in facts], 1).astype(np.float32))


def cut(field: torch.Tensor, size: Shape) -> torch.Tensor:
    """A cube (T, L, Y, X) as tokens (L * t * y * x, size), level by level, then time, latitude, longitude."""
    parts = field.unflatten(0, (-1, size[0])).unflatten(3, (-1, size[1])).unflatten(5, (-1, size[2]))  # (t, dt, L, y, dy, x, dx)
    return parts.permute(2, 0, 3, 5, 1, 4, 6).flatten(4).flatten(0, 3).contiguous()


def masked_tokens(tokens: torch.Tensor, facts: torch.Tensor, levels: int) -> FieldSample:
    """Disturb a random quarter of the tokens (N, P) of each level."""
    per_level = len(tokens) // levels
    count = max(int(per_level * _MASKED_SHARE), 1)
    masked = torch.cat([level * per_level + torch.randperm(per_level)[:count] for level in range(levels)])  # (M,)
    truth = tokens[masked].clone()
    chances = torch.rand(len(masked), 3)
    new = torch.where(chances[:, 2:] < _COARSENED, truth.mean(1, keepdim=True).expand_as(truth), truth)
    new = torch.where(chances[:, 1:2] < _NOISED, new + torch.randn_like(new), new)
    new = torch.where(chances[:, :1] < _ZEROED, torch.zeros_like(new), new)
    tokens = tokens.clone()
    tokens[masked] = new
    return {"tokens": tokens, "facts": facts, "masked": masked, "truth": truth}


def synthetic_atmosphere(rng: np.random.Generator, config: AtmoRepConfig) -> dict[str, FieldSample]:
    """Standard normal tokens without facts as :class:`AtmosphereSamples` has them; what is masked does not come from ``rng``."""
    counts = {name: (config.levels * math.prod(field.tokens), field.values) for name, field in config.fields.items()}
    draw = {name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for name, shape in counts.items()}
    return {name: masked_tokens(values, torch.zeros(len(values), TOKEN_FACTS), config.levels) for name, values in draw.items()}


def write_lookalike(folder: Path, size: str, seed: int, number: int) -> int:
    """Write file ``number``: hours of smooth fields that move, so that neighbours in time and space tell of a masked token. Its bytes."""
    _, hours, levels, rows, columns = LOOKALIKE[size]
    scale = np.array([[8, 10], [0, 8], [260, 12]], np.float32)
    rng = np.random.default_rng([seed, number])
    start = smooth(rng, (len(FIELDS), levels, rows, columns), 6)
    moved = np.stack([np.roll(start, hour, -1) for hour in range(hours)])  # eastward, one point per hour
    data = scale[None, :, 0, None, None, None] + scale[None, :, 1, None, None, None] * moved
    variables: dict[str, tuple[tuple[str, ...], Any]] = {
        "data": (LAYOUT.variables["data"], data.astype(np.float32)),
        "mean": (("field", "level"), np.repeat(scale[:, :1], levels, 1)),
        "std": (("field", "level"), np.repeat(scale[:, 1:], levels, 1)),
        "fields": (("field",), np.array(FIELDS)),
        "levels": (("level",), np.array(LEVELS[:levels], np.int32)),
        "time": (("time",), np.arange(hours, dtype=np.float64) + number * hours),
        "lats": (("lat",), np.linspace(60, 60 - 0.25 * (rows - 1), rows, dtype=np.float32)),
        "lons": (("lon",), np.linspace(0, 0.25 * (columns - 1), columns, dtype=np.float32)),
    }
    lengths = {"time": hours, "field": len(FIELDS), "level": levels, "lat": rows, "lon": columns}
    return write_netcdf(folder / f"atmosphere_{number:02d}.nc", lengths, variables, chunks={"data": (min(hours, 12), 1, 1, rows, columns)})


_FACTS_WIDTH = 16
_TAILS = 16


@dataclass(frozen=True)
class FieldConfig:
    """Width of a field's tokens, how many there are per level along (time, latitude, longitude), and points per token along the same."""

    width: int
    tokens: Shape
    size: Shape

    @property
    def values(self) -> int:
        """Points in a token."""
        return math.prod(self.size)


@dataclass(frozen=True)
class AtmoRepConfig:
    """Sizes of the whole network."""

    fields: Mapping[str, FieldConfig]
    layers: int
    levels: int
    heads: int = 16
    dropout: float = 0.05


_WIND_2024 = FieldConfig(1024, (12, 3, 6), (3, 18, 18))
_TINY = FieldConfig(64, (2, 2, 2), (3, 9, 9))
PRESETS = {
    "384M": AtmoRepConfig(
        {"velocity_u": _WIND_2024, "velocity_v": _WIND_2024, "temperature": FieldConfig(1024, (12, 2, 4), (3, 27, 27))}, layers=6, levels=5
    ),
    "tiny": AtmoRepConfig(
        {"velocity_u": _TINY, "velocity_v": _TINY, "temperature": FieldConfig(32, (2, 2, 2), (3, 9, 9))}, layers=2, levels=2, heads=4
    ),
}
"""Named sizes: the public one of 2024, and one that a CPU trains."""


class AtmoRep(nn.Module):
    """Tokens, their facts and places of masked ones to an ensemble of predictions for these.

    ``forward`` takes, per field, tokens (B, N, P) with the masked ones already disturbed, facts (B, N, 8) and masked places (B, M), and
    returns predictions (B, M, 16, P).
    """

    def __init__(self, config: AtmoRepConfig) -> None:
        super().__init__()
        self.config = config
        self.branches = nn.ModuleDict({name: FieldBranch(name, config) for name in config.fields})

    def forward(
        self, tokens: Mapping[str, torch.Tensor], facts: Mapping[str, torch.Tensor], masked: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Predictions for the masked tokens of each field."""
        branches = {name: cast(FieldBranch, branch) for name, branch in self.branches.items()}
        x = {name: branch.embedded(tokens[name], facts[name]) for name, branch in branches.items()}  # (B, N, D) each
        depths = []
        for layer in range(self.config.layers):
            # All fields move together, each from the state that all had before.
            x = {name: branch.encoder[layer](x[name], [x[other] for other in x if other != name]) for name, branch in branches.items()}
            depths.append(x)
        return {name: branch.decoded([state[name] for state in depths], masked[name]) for name, branch in branches.items()}


class FieldBranch(nn.Module):
    """What belongs to one field: the way in, its encoder and decoder blocks, and 16 ways out."""

    def __init__(self, name: str, config: AtmoRepConfig) -> None:
        super().__init__()
        field = config.fields[name]
        others = [other.width for key, other in config.fields.items() if key != name]
        self.embed = nn.Linear(field.values, field.width - _FACTS_WIDTH)
        self.facts = nn.Linear(TOKEN_FACTS, _FACTS_WIDTH)
        self.encoder = nn.ModuleList(EncoderBlock(field.width, others, config) for _ in range(config.layers))
        self.decoder = nn.ModuleList(DecoderBlock(field.width, config) for _ in range(config.layers))
        self.tails = nn.ModuleList(nn.Sequential(nn.LayerNorm(field.width), _Tail(field.width, field.values)) for _ in range(_TAILS))
        self.register_buffer("places", harmonics(config.levels * math.prod(field.tokens), field.width), persistent=False)

    def embedded(self, tokens: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """Tokens (B, N, P) and their facts (B, N, 8) as (B, N, D)."""
        return torch.cat([self.embed(tokens), self.facts(facts)], -1) + self.get_buffer("places")

    def decoded(self, depths: Sequence[torch.Tensor], masked: torch.Tensor) -> torch.Tensor:
        """From the encoder's states at every depth, (B, N, D), to predictions at the masked places (B, M): (B, M, 16, P)."""
        y = depths[-1]
        for block, state in zip(self.decoder, reversed(depths), strict=True):
            y = block(y, state)
        chosen = y.gather(1, masked.unsqueeze(-1).expand(-1, -1, y.shape[-1])).float()  # (B, M, D)
        with _full_precision(chosen.device):
            return torch.stack([tail(chosen) for tail in self.tails], 2)


class EncoderBlock(nn.Module):
    """Attention among a field's own tokens and, in extra heads, to those of every other field; then an MLP."""

    def __init__(self, width: int, others: Sequence[int], config: AtmoRepConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        crossed = width // config.heads  # one extra head for each of the others
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_others = nn.ModuleList(nn.Linear(width, crossed, bias=False) for _ in others)
        self.kv_others = nn.ModuleList(nn.Linear(other, 2 * crossed, bias=False) for other in others)
        self.out = nn.Linear(width + crossed * len(others), width, bias=False)
        self.mlp = _mlp(width, config.dropout)

    def forward(self, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """(B, N, D) of this field, and the states (B, N', D') of the others."""
        normed = _norm(x)
        q, k, v = (_split(part, self.heads) for part in self.qkv(normed).chunk(3, -1))  # (B, heads, N, D / heads)
        seen = [_attend(_norm(q), _norm(k), v, self.dropout if self.training else 0.0)]
        for q_map, kv_map, other in zip(self.q_others, self.kv_others, others, strict=True):
            k, v = (_split(part, 1) for part in kv_map(_norm(other)).chunk(2, -1))
            q = _split(q_map(normed), 1)
            seen.append(_attend(_norm(q), _norm(k), v, self.dropout if self.training else 0.0))
        x = x + self.out(torch.cat(seen, -1))
        return x + self.mlp(_norm(x))


class DecoderBlock(nn.Module):
    """Half of the heads look at the decoder's own tokens, half at the encoder's of the mirrored depth; then an MLP."""

    def __init__(self, width: int, config: AtmoRepConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads // 2, config.dropout
        self.qkv = nn.Linear(width, 3 * width // 2, bias=False)
        self.q_encoder = nn.Linear(width, width // 2, bias=False)
        self.kv_encoder = nn.Linear(width, width, bias=False)
        self.norm_q, self.norm_k = (nn.LayerNorm(width // config.heads) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = _mlp(width, config.dropout)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        """Decoder state and encoder state, both (B, N, D)."""
        normed, dropout = _norm(x), self.dropout if self.training else 0.0
        q, k, v = (_split(part, self.heads) for part in self.qkv(normed).chunk(3, -1))
        own = _attend(self.norm_q(q), self.norm_k(k), v, dropout)  # (B, N, D / 2)
        k, v = (_split(part, self.heads) for part in self.kv_encoder(_norm(encoded)).chunk(2, -1))
        crossed = _attend(self.norm_q(_split(self.q_encoder(normed), self.heads)), self.norm_k(k), v, dropout)  # (B, N, D / 2)
        x = x + self.out(torch.cat([own, crossed], -1))
        return x + self.mlp(_norm(x))


class _Tail(nn.Linear):
    """Computes in fp32, also where autocast is on around the network: of derived layers, weights are not cast before an inference."""


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """fp32 inside an autocast region; the meta device, on which FLOPs are counted, knows no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Layer norm without scale and shift."""
    return F.layer_norm(x, x.shape[-1:])


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, N, heads * W) -> (B, heads, N, W)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    q, k = q.to(v.dtype), k.to(v.dtype)  # autocast normalises in fp32
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(2)  # (B, N, heads * W)


def _mlp(width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width), nn.GELU())


def harmonics(count: int, width: int) -> torch.Tensor:
    """Sines and cosines of the token's number at falling frequencies (Vaswani et al., arXiv 1706.03762, section 3.5), (count, width)."""
    angle = torch.arange(count)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)


def ensemble_loss(predicted: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Squared error of every member, and how well the ensemble's normal distribution covers the truth (arXiv 2308.13280, section 3.2).

    With mean m and standard deviation s over the members: ``mean((y - x)^2) + mean((exp(-((y - m) / s)^2 / 2) - 1)^2) + mean(sqrt(s))``.
    ``predicted`` (B, M, members, P), ``truth`` (B, M, P).
    """
    mean, std = predicted.mean(2), predicted.std(2).clamp(min=1e-6)  # (B, M, P); a spread of 0 has no gradient
    squared = (predicted - truth.unsqueeze(2)).square().mean()
    covered = torch.exp(-0.5 * ((truth - mean) / std).square())
    return squared + (covered - 1).square().mean() + std.sqrt().mean()


def build(ctx: BuildContext[AtmoRepParams]) -> Task:
    """Build the network, AdamW, and the stream of ``{field: {tokens (B, N, P), facts (B, N, 8), masked (B, M), truth (B, M, P)}}``."""
    params, config = ctx.params, PRESETS[ctx.params.preset]
    draw = partial(synthetic_atmosphere, config=config)
    given = open_input(ctx, "atmorep", lambda folder, split: AtmosphereSamples(folder, config, split), draw, SAMPLES_WITHOUT_FILES)
    torch.manual_seed(ctx.seed)
    with torch.device(ctx.device):
        model = AtmoRep(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, weight_decay=params.weight_decay, fused=ctx.fused)
    values = sum(field.values * math.prod(field.tokens) for field in config.fields.values())
    facts = counted_facts("sample", model, given, _flops(params), bytes_per_sample=4 * config.levels * values)
    return given.task(model, optimizer, masked_loss, facts, predict=_predict)


def _predict(net: Any, batch: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return net(*({name: field[key] for name, field in batch.items()} for key in ("tokens", "facts", "masked")))


def masked_loss(net: Any, batch: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
    """The ensemble's loss on the masked tokens, the mean over fields."""
    predicted = _predict(net, batch)
    return torch.stack([ensemble_loss(predicted[name], field["truth"]) for name, field in batch.items()]).mean()


def _flops(params: AtmoRepParams) -> tuple[float, float]:
    """FLOPs of one sample with a quarter of its tokens masked: forward, and forward with backward; no activation recomputed."""
    config = PRESETS[params.preset]
    with torch.device("meta"):
        model, batch = AtmoRep(config), {}
        for name, field in config.fields.items():
            count, masked = config.levels * math.prod(field.tokens), config.levels * (math.prod(field.tokens) // 4)
            batch[name] = {
                "tokens": torch.empty(1, count, field.values),
                "facts": torch.empty(1, count, TOKEN_FACTS),
                "masked": torch.zeros(1, masked, dtype=torch.int64),
                "truth": torch.empty(1, masked, field.values),
            }
        return forward_and_training_flops(lambda: masked_loss(model, batch), 1)
