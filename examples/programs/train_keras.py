"""ResNet-50 by TensorFlow on random images; with Horovod also on several processes.

python3 train_keras.py --batch 16
horovodrun -np 2 python3 train_keras.py --horovod --batch 16
"""

import argparse


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16, help="images of a step, of all processes")
    parser.add_argument("--steps", type=int, default=20, help="steps of the window")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--horovod", action="store_true", help="started by horovodrun")
    return parser.parse_args(words)


def main(asked: argparse.Namespace) -> None:
    """Train, and say on the first process when the window begins and ends."""
    import tensorflow as tf

    rank, share, gradients_of = 0, asked.batch, lambda tape: tape
    if asked.horovod:
        import horovod.tensorflow as hvd

        hvd.init()
        if gpus := tf.config.list_physical_devices("GPU"):
            tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        rank, share, gradients_of = hvd.rank(), asked.batch // hvd.size(), hvd.DistributedGradientTape
    size = asked.image_size
    model = tf.keras.applications.ResNet50(weights=None, input_shape=(size, size, 3))
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy()
    images, labels = tf.random.normal((share, size, size, 3)), tf.random.uniform((share,), maxval=1000, dtype=tf.int64)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply_gradients(zip(gradients_of(tape).gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    loss = step()
    if asked.horovod:
        hvd.broadcast_variables(model.variables, root_rank=0)
    for count, word in ((2, "begin"), (asked.steps, "end")):
        for _ in range(count):
            loss = step()
        loss.numpy()  # the work is done, not only asked for
        if rank == 0:
            print(word, flush=True)
    if rank == 0:
        print(f"images: {asked.steps * asked.batch}", flush=True)


if __name__ == "__main__":
    main(parse())
