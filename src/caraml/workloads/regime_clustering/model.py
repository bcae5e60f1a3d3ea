"""Deep clustering of weather fields: a ResNet-50 with a projection head, and spherical k-means over its features.

MAELSTROM's sixth application (deliverable D3.7, section 4.9) trains DeepCluster v2, the variant described in Caron et al., Unsupervised
Learning of Visual Features by Contrasting Cluster Assignments, arXiv 2006.09882: features of an epoch are clustered, and in the next one
the network learns to predict each sample's cluster. With 25 channels and 4 heads of 40 prototypes: 28,060,224 parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CHANNELS = 25
HEADS = 4
"""Sets of prototypes, each clustered from its own start."""
FEATURES = 128
_HIDDEN = 2048
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Bottleneck width, blocks, stride of each stage of a ResNet-50 (He et al., arXiv 1512.03385)."""


class RegimeNetwork(nn.Module):
    """Fields (B, 25, H, W) to features of length 1, (B, 128), and a score for each prototype, a (B, K) per head.

    The prototypes are the clusters' centroids: k-means sets them, gradients do not.
    """

    def __init__(
        self, heads: Sequence[int] = (40,) * HEADS, stages: Sequence[tuple[int, int, int]] = _STAGES, hidden: int = _HIDDEN
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(CHANNELS, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        channels = 64
        for width, count, stride in stages:
            for index in range(count):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
        self.trunk = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Linear(channels, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, FEATURES))
        self.prototypes = nn.ModuleList(nn.Linear(FEATURES, count, bias=False) for count in heads)
        self.prototypes.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Features and scores (cosine similarities)."""
        x = self.trunk(self.stem(x))  # (B, 2048, H/32, W/32)
        features = F.normalize(self.head(x.mean((2, 3))), dim=1)  # (B, 128)
        return features, [prototypes(features) for prototypes in self.prototypes]


class Bottleneck(nn.Module):
    """Three convolutions around a narrow middle, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) to (B, 4 width, H / stride, W / stride)."""
        return F.relu(self.body(x) + self.shortcut(x))


def spherical_k_means(features: torch.Tensor, centroids: torch.Tensor, iterations: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """K-means on the unit sphere over the features of all ranks together (Dhillon and Modha, Machine Learning 42, 2001).

    Collective if there is a process group. A cluster that loses all its members keeps its centroid.

    Args:
        features: of this rank, length 1, (N, D).
        centroids: to begin with, the same on all ranks, length 1, (K, D).
        iterations: of assigning and averaging.

    Returns:
        Centroids (K, D), the same on all ranks, and the cluster of each of this rank's features, int64 (N,).
    """
    for _ in range(iterations):
        clusters = (features @ centroids.T).argmax(1)  # (N,)
        sums = torch.zeros_like(centroids).index_add_(0, clusters, features)  # (K, D)
        counts = torch.bincount(clusters, minlength=len(centroids)).to(sums.dtype)  # (K,)
        total = all_reduced(torch.cat([sums, counts[:, None]], 1))  # (K, D + 1)
        moved = F.normalize(total[:, :-1], dim=1)
        centroids = torch.where(total[:, -1:] > 0, moved, centroids)
    return centroids, (features @ centroids.T).argmax(1)


def all_reduced(values: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """``values`` summed (or otherwise combined) over all ranks; as they are without a process group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, operation)
    return values


class MemoryBank:
    """Features of the samples that this rank sees in an epoch, and what k-means makes of those of all ranks.

    Attributes:
        positions: of the samples in the data set, (N,).
        features: for each crop, (crops, N, D).
        labels: cluster of every sample of the whole data set under each head, (heads, samples), the same on all ranks; -1 for samples
            that no rank saw.
    """

    def __init__(self, per_epoch: int, samples: int, *, crops: int, heads: Sequence[int], width: int, device: torch.device) -> None:
        """Reserve places for ``per_epoch`` samples of this rank, of ``samples`` in the data set."""
        self.positions = torch.full((per_epoch,), -1, dtype=torch.int64, device=device)
        self.features = torch.zeros(crops, per_epoch, width, device=device)
        self.labels = torch.full((len(heads), samples), -1, dtype=torch.int64, device=device)
        self._heads = list(heads)

    def write(self, place: int, positions: torch.Tensor, features: Sequence[torch.Tensor]) -> None:
        """Keep a batch: positions (B,) and, per crop, features (B, D), at places ``place`` to ``place + B - 1``."""
        end = place + len(positions)
        self.positions[place:end] = positions
        for kept, new in zip(self.features, features, strict=True):
            kept[place:end] = new.detach().float()

    def cluster(self, seed: int) -> list[torch.Tensor]:
        """Cluster the bank anew for every head, heads taking turns among the crops; sets ``labels``, returns centroids (K, D) per head.

        First centroids are the features of samples that the seed chooses among those that any rank saw.
        """
        known = torch.zeros(self.labels.shape[1], dtype=torch.int32, device=self.labels.device)
        known[self.positions] = 1
        seen = all_reduced(known, dist.ReduceOp.MAX).nonzero()[:, 0]  # positions, in order
        centroids = []
        for head, count in enumerate(self._heads):
            generator = torch.Generator().manual_seed(seed * len(self._heads) + head)
            chosen = seen[torch.randperm(len(seen), generator=generator)[:count].to(seen.device)]
            features = self.features[head % len(self.features)]
            first = self._first(chosen, features, count, generator)
            centroid, clusters = spherical_k_means(features, first)
            found = torch.full_like(self.labels[head], -1)
            found[self.positions] = clusters
            self.labels[head] = all_reduced(found, dist.ReduceOp.MAX)
            centroids.append(centroid)
        return centroids

    def _first(self, chosen: torch.Tensor, features: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        """Features of the chosen positions, wherever they are; random directions where there are fewer samples than clusters."""
        rows = torch.zeros(count, features.shape[1] + 1, device=features.device)
        for row, position in enumerate(chosen):
            places = (self.positions == position).nonzero()[:1, 0]
            if len(places):
                rows[row, :-1], rows[row, -1] = features[places[0]], 1
        rows = all_reduced(rows)
        rows = rows[:, :-1] / rows[:, -1:].clamp(min=1)
        if len(chosen) < count:
            rows[len(chosen) :] = torch.randn(count - len(chosen), features.shape[1], generator=generator).to(features.device)
        return F.normalize(rows, dim=1)


def cluster_loss(scores: Sequence[torch.Tensor], labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
    """Cross entropy of ``scores / temperature`` against the clusters, the mean over heads; samples without a cluster do not count.

    Args:
        scores: per head, cosine similarities (B, K).
        labels: (heads, B), -1 where there is none.
        temperature: divides the scores.
    """
    losses = [F.cross_entropy(score.float() / temperature, label, ignore_index=-1) for score, label in zip(scores, labels, strict=True)]
    return torch.stack(losses).mean()
