"""A small convolutional network on random images; `mpirun` or `srun` starts its processes.

mpirun -n 2 python3 train_mpi.py --batch 64
"""

import argparse
import os


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="images of a step, of all processes")
    parser.add_argument("--steps", type=int, default=200, help="steps of the window")
    return parser.parse_args(words)


def place() -> tuple[int, int]:
    """This process's rank and the number of processes, as Open MPI, Slurm, and MPICH and its relatives say."""
    for rank, size in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def main(asked: argparse.Namespace) -> None:
    """Train, and say on the first process when the window begins and ends."""
    import torch
    from torch import distributed, nn

    rank, size = place()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # on several nodes: the first one's
    os.environ.setdefault("MASTER_PORT", "29431")
    gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=size)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    network = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).to(device)
    images, labels = (
        torch.randn(asked.batch // size, 3, 32, 32, device=device),
        torch.randint(10, (asked.batch // size,), device=device),
    )
    network(images)  # makes the lazy layer's weights
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for count, word in ((3, "begin"), (asked.steps, "end")):
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        loss.item()  # the work is done, not only asked for
        if rank == 0:
            print(word, flush=True)
    if rank == 0:
        print(f"images: {asked.steps * asked.batch}", flush=True)
    distributed.destroy_process_group()
    os._exit(0)  # at once: threads of torch abort some processes while their interpreter shuts down


if __name__ == "__main__":
    main(parse())
