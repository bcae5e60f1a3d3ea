"""Stands in for the programs of graphcore/examples that the suites for IPUs run: the same arguments, the same words, no IPU.

``python programs.py gpt|resnet50|cnns ARGUMENTS``. An argument that the program does not have ends it, as it does there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

STEP = 0.3
"""Seconds of a step, or an epoch; the first takes twice as long, as it compiles."""
IMAGES = 1_281_167


def gpt(arguments: list[str]) -> None:
    """``nlp/gpt2/pytorch/train_gpt2.py``: generated data are four steps, each of ``device_iterations`` optimizer steps."""
    parser = argparse.ArgumentParser()
    for name in ("model", "dataset", "optimizer", "lr-schedule", "learning-rate", "lr-warmup", "enable-half-partials", "remap-logit"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("replicated-tensor-sharding", "recompute-checkpoint-every-layer", "enable-sequence-serialized"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("epochs", "batch-size", "gradient-accumulation", "max-len", "replication-factor", "ipus-per-replica", "device-iterations"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--embedding-serialization-factor", type=int, required=True)
    parser.add_argument("--layers-per-ipu", type=int, nargs="+", required=True)
    parser.add_argument("--matmul-proportion", type=float, nargs="+", required=True)
    args = parser.parse_args(arguments)
    assert len(args.layers_per_ipu) == len(args.matmul_proportion) == args.ipus_per_replica and sum(args.layers_per_ipu) == 12
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    samples = args.replication_factor * args.batch_size * args.gradient_accumulation * args.device_iterations
    logging.info("Model initializing")
    logging.info(f"Samples per epoch: {4 * samples}")
    for step in range(4 * args.epochs):
        time.sleep(STEP if step else 2 * STEP)
        rate = samples / (STEP if step else 2 * STEP)
        epoch, index = divmod(step, 4)
        logging.info(f"step {index} of epoch {epoch}, loss: 10.9375, acc: 2.0e-05, lr: 0.00015, throughput: {rate} samples/sec")


def resnet50(arguments: list[str]) -> None:
    """``vision/cnns/tensorflow2/train.py``: an epoch is all whole batches of ImageNet, and is logged at its end."""
    parser = argparse.ArgumentParser()
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--dataset-path")
    data.add_argument("--synthetic-data", choices=("cpu", "ipu"))
    parser.add_argument("--config", required=True)
    parser.add_argument("--validation", choices=("true", "false"), required=True)
    parser.add_argument("--mlperf-logging", action="store_true")
    for name in ("num-replicas", "num-epochs", "logs-per-epoch", "global-batch-size", "micro-batch-size", "dbn-replica-group-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    assert args.global_batch_size % (args.micro_batch_size * args.num_replicas) == 0 and args.logs_per_epoch == 1
    updates = IMAGES // args.global_batch_size
    images, batches = updates * args.global_batch_size, updates * args.global_batch_size // args.micro_batch_size
    logging.info(f"micro_batches_per_epoch = {batches}")
    logger = logging.getLogger("logging_callback")
    logger.info(f"logging every {batches} micro batches")
    for epoch in range(args.num_epochs):
        time.sleep(STEP if epoch else 2 * STEP)
        if epoch == 0:
            logger.info(f"Compilation Time {2 * STEP} s")
        logger.info(f"batch {batches}: {['loss: 6.9 ', f'throughput: {images / STEP} samples/sec']}")


def cnns(arguments: list[str]) -> None:
    """``vision/cnns/pytorch/train/train.py``, as ``poprun`` starts it; ``REPLICAS`` stands for what that tells it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", choices=("resnet50", "resnet50-pod4", "resnet50-pod64"), required=True)
    parser.add_argument("--imagenet-data-path", required=True)
    parser.add_argument("--validation-mode", choices=("none", "during", "after"), required=True)
    for name in ("micro-batch-size", "gradient-accumulation", "epoch", "dataloader-worker", "dataloader-rebatch-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    update = int(os.environ["REPLICAS"]) * args.micro_batch_size * args.gradient_accumulation
    for epoch in range(1, args.epoch + 1):
        logging.info(f"Epoch {epoch}/{args.epoch}")
        length = STEP if epoch > 1 else 2 * STEP
        time.sleep(length)
        logging.info(f"Epoch {epoch}")
        logging.info("loss: 6.9000,")
        logging.info(f"throughput: {IMAGES // update * update / length:0.1f} samples/sec")


def poprun(arguments: list[str]) -> None:
    """Starts the program once; the real one starts it ``--num-instances`` times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-instances", type=int, required=True)
    parser.add_argument("--num-replicas", type=int, required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    assert args.num_replicas % args.num_instances == 0
    os.execvpe(args.program[0], args.program, {**os.environ, "REPLICAS": str(args.num_replicas)})  # noqa: S606 -- as poprun does


if __name__ == "__main__":
    {"gpt": gpt, "resnet50": resnet50, "cnns": cnns, "poprun": poprun}[sys.argv[1]](sys.argv[2:])
