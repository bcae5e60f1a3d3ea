"""A training loop of one's own, measured by CARAML: two lines more than without.

python examples/own_loop.py
torchrun --nproc-per-node=2 examples/own_loop.py
"""

import os

import torch
from torch import nn

import caraml

BATCH = 64


def main() -> None:
    """Train a small network on random images."""
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = torch.randn(BATCH, 3 * 32 * 32, device=device), torch.randint(10, (BATCH,), device=device)
    model: nn.Module = nn.Sequential(nn.Linear(3 * 32 * 32, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    if torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = caraml.Policy(target=0.05, min_seconds=1, max_seconds=10, idle_seconds=0.5)
    with caraml.measure("small-network", item="image", params={"batch": BATCH}, policy=policy) as m:
        for _ in range(100_000):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if not m.step(BATCH):
                break
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
