"""What a model is fed: tokens, images and synthetic samples, and the loader that brings them to the device.

``store`` says where prepared data lives; ``text``, ``tokens`` and ``images`` prepare and read it; ``synthetic`` makes it up;
``loader`` turns any of them into an endless stream of batches. Reading, writing and preparing text need no torch.
"""
