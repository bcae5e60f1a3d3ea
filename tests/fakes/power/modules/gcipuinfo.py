"""A stand-in for Graphcore's library. ``FAKE_IPU`` is a JSON list of the texts that the devices answer."""
# ruff: noqa: N801, N802 - the names are the library's

import json
import os

IpuPower = "ipu power"


class gcipuinfo:
    def _answers(self):
        return json.loads(os.environ.get("FAKE_IPU", '["100.00W"]'))

    def getDevices(self):
        return [{"id": str(i)} for i in range(len(self._answers()))]

    def getNamedAttributeForAll(self, name):
        assert name == IpuPower
        return self._answers()
