"""A stand-in for Gaudi's library. ``FAKE_GAUDI_MW`` is a JSON list of powers in mW; 0 stands for a read that failed."""
# ruff: noqa: N802 - the names are the library's

import json
import os


class HLMLError(Exception):
    pass


def _powers():
    return json.loads(os.environ.get("FAKE_GAUDI_MW", "[250000]"))


def hlmlInit():
    pass


def hlmlShutdown():
    pass


def hlmlDeviceGetCount():
    return len(_powers())


def hlmlDeviceGetHandleByIndex(index):
    return index


def hlmlDeviceGetUUID(handle):
    return f"01P0-HL2080A0-{handle}".encode()


def hlmlDeviceGetPowerUsage(handle):
    return _powers()[handle]
