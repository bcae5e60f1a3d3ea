"""Every sample once per epoch over all ranks, in an order that a seed repeats, by workers that end."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caraml.base.errors import InputError
from caraml.data import loader
from caraml.data.loader import EndlessBatches, default_workers, device_batches, stream, to_device
from caraml.workloads.gpt.tokens import IndexedTokens, IndexedTokensWriter, TokenSamples, synthetic_tokens
from caraml.workloads.image_classification.images import ImageSamples, synthetic_images
from caraml.workloads.image_classification.store import FolderStore


class Positions(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> int:
        return position


def children() -> set[int]:
    """Processes that this one has started and that still run."""
    answer = subprocess.run(["ps", "-o", "pid=,comm=,stat=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False)
    rows = (line.split() for line in answer.stdout.splitlines())
    return {int(pid) for pid, command, state, *_ in rows if command != "ps" and "Z" not in state}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 7), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_gives_every_sample_to_one_rank_once(count: int, batch_size: int, world_size: int, number: int) -> None:
    if count // world_size < batch_size:
        with pytest.raises(InputError, match=f"at least {batch_size * world_size}"):
            EndlessBatches(count, batch_size, seed=1, rank=0, world_size=world_size, drop_last=True)
        return
    ranks = [EndlessBatches(count, batch_size, seed=1, rank=r, world_size=world_size, drop_last=True) for r in range(world_size)]
    parts = [rank.epoch(number) for rank in ranks]
    assert {len(part) for part in parts} == {count // world_size}
    together = np.concatenate(parts)
    assert len(set(together.tolist())) == len(together) == count - count % world_size


def test_in_order_a_step_takes_neighbours_and_a_rank_its_block_of_each_micro_batch() -> None:
    """23 samples, two ranks, two micro-batches of 2 in a step: 16 fill steps."""
    named: dict[str, Any] = {"seed": 1, "world_size": 2, "drop_last": True, "batches_per_step": 2, "in_order": True}
    first, second = ([*itertools.islice(EndlessBatches(23, 2, rank=rank, **named), 5)] for rank in range(2))
    assert first == [[0, 1], [4, 5], [8, 9], [12, 13], [0, 1]]
    assert second == [[2, 3], [6, 7], [10, 11], [14, 15], [2, 3]]
    with pytest.raises(InputError, match="found 7 samples; expected at least 8"):
        EndlessBatches(7, 2, rank=0, **named)


@pytest.mark.parametrize(("facts", "named"), [({"path": "/data/a.h5"}, "/data/a.h5: "), ({"path": None, "of": "ap6"}, "ap6: "), ({}, "")])
def test_data_that_are_too_few_are_named(facts: dict[str, str | None], named: str) -> None:
    dataset = Positions(3)
    if facts:
        dataset.describe = lambda: facts  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=f"^{named}found 3 samples; expected at least 4") as caught:
        stream(dataset, 4, workers=0)
    assert caught.value.hint == "use a smaller batch or more data"


def test_without_dropping_every_sample_of_every_epoch_is_used_in_full_batches() -> None:
    batches = itertools.islice(stream(Positions(10), 4, workers=0, drop_last=False), 5)
    taken = [batch.tolist() for batch in batches]
    assert [len(batch) for batch in taken] == [4] * 5
    flat = list(itertools.chain.from_iterable(taken))
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]


def test_the_order_is_a_function_of_seed_and_epoch_and_not_of_the_workers() -> None:
    def order(seed: int, workers: int) -> list[list[int]]:
        with stream(Positions(20), 4, workers=workers, seed=seed) as batches:
            return [next(batches).tolist() for _ in range(12)]

    first = order(7, 0)
    assert first == order(7, 0) == order(7, 2)
    assert first != order(8, 0)
    assert sorted(itertools.chain(*first[:5])) == sorted(itertools.chain(*first[5:10])) == list(range(20))
    assert first[:5] != first[5:10]


def test_random_crops_repeat_with_the_seed_and_leave_the_models_random_numbers_alone(
    image_folder: tuple[Path, int, int],
) -> None:
    samples = ImageSamples(FolderStore(image_folder[0]), 32)
    for workers in (0, 1):
        torch.manual_seed(5)
        expected = torch.rand(3)
        taken = []
        for disturbance in (1, 2):
            torch.manual_seed(disturbance)
            with stream(samples, 4, workers=workers, seed=3) as batches:
                taken.append([next(batches) for _ in range(3)])
        for (images, labels), (same_images, same_labels) in zip(*taken, strict=True):
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)
        torch.manual_seed(5)
        with stream(samples, 4, workers=workers, seed=3) as batches:
            next(batches)
            assert torch.equal(torch.rand(3), expected)


def test_crops_do_not_depend_on_the_number_of_workers_and_differ_between_epochs(image_folder: tuple[Path, int, int]) -> None:
    def epochs(workers: int) -> list[list[torch.Tensor]]:
        samples = ImageSamples(FolderStore(image_folder[0]), 32, seed=3)
        samples.store._paths, samples.store.labels = samples.store._paths[::25], samples.store.labels[::25]  # type: ignore[attr-defined]
        with stream(samples, 4, workers=workers, seed=3) as batches:
            return [next(batches) for _ in range(4)]

    alone, helped = epochs(0), epochs(2)
    for (images, labels), (same_images, same_labels) in zip(alone, helped, strict=True):
        assert torch.equal(images, same_images) and torch.equal(labels, same_labels)
    assert not torch.equal(alone[0][0], alone[2][0])


def test_no_accumulated_step_reaches_over_the_end_of_an_epoch() -> None:
    with stream(Positions(22), 2, workers=0, world_size=2, rank=1, batches_per_step=3) as batches:
        taken = [next(batches).tolist() for _ in range(6)]
    assert all(len(set(itertools.chain(*epoch))) == 6 for epoch in (taken[:3], taken[3:]))


def test_two_ranks_crop_differently(image_folder: tuple[Path, int, int]) -> None:
    samples = ImageSamples(FolderStore(image_folder[0]), 32)
    samples.store._paths, samples.store.labels = samples.store._paths[:1] * 8, samples.store.labels[:8]  # one image: only the crops differ
    first, second = (next(stream(samples, 4, workers=0, rank=rank, world_size=2))[0] for rank in (0, 1))
    assert not torch.equal(first, second)


def test_batches_have_the_promised_shapes(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    with IndexedTokensWriter.at(tmp_path / "x", 500) as writer:
        writer.add(np.arange(481) % 500)
    with stream(TokenSamples(IndexedTokens(tmp_path / "x"), 16), 3, workers=1) as batches:
        tokens = next(batches)
    assert (tokens.dtype, tokens.shape) == (torch.int64, (3, 17))
    assert torch.equal(tokens[:, 1:], tokens[:, :-1] + 1)
    with stream(ImageSamples(FolderStore(image_folder[0])), 2, workers=0) as batches:
        images, labels = next(batches)
    assert (images.dtype, images.shape) == (torch.uint8, (2, 3, 224, 224))
    assert (labels.dtype, labels.shape) == (torch.int64, (2,))


def test_closing_ends_the_workers_and_the_stream() -> None:
    before = children()
    batches = stream(Positions(100), 4, workers=2)
    next(batches)
    assert len(children() - before) == 2
    batches.close()
    assert children() <= before
    assert list(batches) == []
    batches.close()


def test_a_worker_that_dies_while_it_hands_over_a_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks before the death is known: which of the two torch reports used to be a matter of microseconds."""
    monkeypatch.setattr(loader, "_REPORT_OF_A_DEATH", 300.0)  # a timer, too, may be late on a busy machine
    with stream(Positions(100), 4, workers=1) as batches:
        next(batches)
        (worker,) = torch.multiprocessing.active_children()

        def cut_off() -> Iterator[None]:
            threading.Timer(0.3, worker.kill).start()
            raise ConnectionResetError("reset by peer")
            yield

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=f"pid {worker.pid}\\) is killed by signal: Killed"):
            patch.setattr(batches, "_batches", cut_off())
            next(batches)


def test_workers_end_when_their_process_is_killed(start_python: Callable[..., subprocess.Popen[str]]) -> None:
    process = start_python(
        "import time, torch.multiprocessing as mp\n"
        "from caraml.data.loader import stream\n"
        "from caraml.workloads.gpt.tokens import synthetic_tokens\n"
        "batches = stream(synthetic_tokens(100, 8), 4, workers=2); next(batches)\n"
        "print(*[child.pid for child in mp.active_children()], flush=True); time.sleep(60)\n"
    )
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 300
    while any(running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.communicate()


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_error_in_a_worker_arrives_as_the_error_it_is(tmp_path: Path) -> None:
    with IndexedTokensWriter.at(tmp_path / "x", 500) as writer:
        writer.add([499] * 100)
    samples = TokenSamples(IndexedTokens(tmp_path / "x"), 8, vocab_size=499)
    before = children()
    with stream(samples, 2, workers=1) as batches, pytest.raises(InputError, match="token 499"):
        next(batches)
    assert children() <= before


def test_workers_follow_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, processes, accelerator, cpu in (
        (1, 1, 0, 0),
        (2, 1, 1, 0),
        (6, 1, 5, 1),
        (72, 1, 16, 1),
        (72, 4, 16, 1),
        (8, 4, 1, 0),
        (2, 4, 0, 0),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_workers("cuda", processes) == accelerator
        assert default_workers("cpu", processes) == cpu


def test_on_the_cpu_batches_pass_through() -> None:
    batches = stream(Positions(8), 2, workers=0)
    assert to_device(batches, torch.device("cpu")) is batches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_on_a_gpu_batches_arrive_unchanged_and_in_order() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with stream(synthetic_images(10, 64, samples=64), 8, workers=2, pin_memory=True) as batches:
        there = [[tensor.cpu() for tensor in batch] for batch in itertools.islice(to_device(batches, device), 20)]
    with stream(synthetic_images(10, 64, samples=64), 8, workers=0) as batches:
        here = list(itertools.islice(batches, 20))
    for (images, labels), (same_images, same_labels) in zip(there, here, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
    finite = to_device(iter([torch.ones(2), torch.zeros(2)]), device)
    assert [batch.sum().item() for batch in finite] == [2, 0]


def test_synthetic_samples_are_functions_of_seed_and_position() -> None:
    tokens = synthetic_tokens(50, 32, seed=1)
    assert torch.equal(tokens[5], tokens[5])
    assert not torch.equal(tokens[5], tokens[6])
    assert not torch.equal(tokens[5], synthetic_tokens(50, 32, seed=2)[5])
    assert (tokens[5].dtype, tokens[5].shape) == (torch.int64, (33,))
    ids = torch.cat([tokens[i] for i in range(300)])
    assert set(ids.tolist()) == set(range(50))
    image, label = synthetic_images(10, 16, 8)[3]
    assert (image.dtype, image.shape) == (torch.uint8, (3, 16, 16))
    assert 0 <= label < 10
    assert (tokens.describe()["kind"], tokens.describe()["bytes"]) == ("synthetic", 0)
    with stream(tokens, 4, workers=0) as batches:
        assert next(batches).shape == (4, 33)


def test_device_batches_are_few_fixed_and_used_in_turn() -> None:
    batches = device_batches(synthetic_images(10, 16, 8), 2, torch.device("cpu"), count=3)
    taken = [next(batches) for _ in range(7)]
    assert taken[0] is taken[3] is taken[6]
    assert not torch.equal(taken[0][0], taken[1][0])
    other = next(device_batches(synthetic_images(10, 16, 8), 2, torch.device("cpu"), rank=1))
    assert not torch.equal(taken[0][0], other[0])
    assert next(device_batches(synthetic_images(10, 16, samples=3), 8, torch.device("cpu")))[0].shape[0] == 8
