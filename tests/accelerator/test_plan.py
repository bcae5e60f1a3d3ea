"""What the verbs say of an accelerator that a plug-in of torch brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.accelerator.conftest import ROOT


def test_a_plan_names_the_accelerator(surroundings: dict[str, str], tmp_path: Path) -> None:
    def said(*words: str) -> str:
        command = [sys.executable, "-m", "caraml", *words]
        return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=True).stdout

    system = json.loads(said("system", "detect", "--json"))
    assert [(device["model"], device["kind"], device["memory_bytes"]) for device in system["devices"]] == [
        ("Emulated Accelerator", "other", 4_000_000_000)
    ] * 2
    assert "gpt b64 bf16" in said("plan", "quick", "--out", str(tmp_path / "out")), "the suite's sizes for accelerators"


def test_a_plug_in_that_does_not_import_is_told_before_anything_runs(tmp_path: Path, real_start: None) -> None:
    plugin = tmp_path / "plugin" / "acme-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[torch.backends]\nacme = acme_torch:load\n")
    (plugin.parent / "acme_torch.py").write_text("raise ImportError('libacme.so.3: cannot open shared object file')\n")
    places = os.pathsep.join(filter(None, [str(plugin.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "caraml", "plan", "quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "cannot be imported with its plug-in acme_torch" in said and "libacme.so.3" in said
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said and "Traceback" not in said
