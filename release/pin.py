"""Write the hash of every file that an installation downloads: ``python release/pin.py > release/hashes.txt``.

The list is for Linux on x86-64 and the Python that runs this. ``pip install --require-hashes --no-deps -r release/hashes.txt`` then
installs these bytes or nothing. Torch is left out: which build of it fits depends on the machine.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BY_THE_MACHINE = ("torch", "torchvision", "triton", "nvidia-", "caraml")
"""Names, and beginnings of names, that are chosen by the machine's accelerator."""


def main() -> None:
    """Ask pip what it would install, and print name, version and hash of each file."""
    wanted = ["--editable", f"{ROOT}[test]"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, "--constraint", str(ROOT / "constraints.txt"), *wanted], capture_output=True, text=True, check=True)  # noqa: S603 -- pip of the environment that is to be pinned
    here = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    print(f"# Files of an installation on {here}; made by release/pin.py")
    lines = []
    for item in json.loads(done.stdout)["install"]:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        if name.startswith(BY_THE_MACHINE) and name != "nvidia-ml-py":
            continue
        lines.append(f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}")
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()
