"""A throw-away Slurm cluster on one machine: real daemons, virtual nodes, GPUs that are device nodes without a GPU behind them.

Every node is a ``slurmd`` of its own, with a host name of its own (a UTS namespace), so that what differs between nodes differs here too.
Ports, keys and state are private to the cluster's folder; the only thing outside of it is a marked block in /etc/hosts, which goes with it.

By hand, as root: ``python -m tests.slurm.cluster FOLDER`` starts one and says what to export; ``... FOLDER stop`` ends it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.debian import install

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "unshare")
HOSTS = Path("/etc/hosts")
CPUS, GPUS = 4, 2


def available() -> str | None:
    """Why there can be no cluster here, or ``None``; gets Slurm from Debian's packages where it is missing."""
    if os.getuid() != 0:
        return "the Slurm launcher: a cluster of virtual nodes needs root"
    if (lacking := _lacking()) is not None:
        return f"the Slurm launcher: {lacking}"
    reason = install(PACKAGES, PROGRAMS)
    if reason is None and subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        reason = "the Slurm launcher: this machine does not let root make namespaces for virtual nodes"
    return reason


def _lacking() -> str | None:
    """What not every root may do: that of a container, or of a user's own namespace."""
    with tempfile.TemporaryDirectory(prefix="caraml-slurm-") as folder:
        try:
            _make_device(Path(folder, "gpu"))
        except OSError as error:
            return f"this machine does not let root make device nodes ({error.strerror})"
    try:
        HOSTS.open("a").close()
    except OSError as error:
        return f"{HOSTS} cannot be written ({error.strerror})"
    return None


class Cluster:
    """Nodes ``sn1`` ... ``snN``. Partition ``main`` has all of them, ``short`` lets a job run for one minute."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder, self.nodes = folder, [f"sn{number + 1}" for number in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every daemon and wait until all nodes are idle. Raises ``RuntimeError`` with the logs' ends."""
        for name in ("run", "log", "spool", "state", "dev"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self._start_munge()
        self._name_nodes()
        for number in range(GPUS):
            _make_device(self.folder / "dev" / f"gpu{number}")
        self._configure()
        self.start_controller(clean=True)
        for node in self.nodes:
            self.start_node(node)
        self._wait("nodes are not idle", lambda: self._idle() == len(self.nodes))

    def start_controller(self, clean: bool = False) -> None:
        """Start slurmctld; it remembers the jobs unless ``clean``."""
        subprocess.run(["slurmctld", *(["-c"] if clean else [])], env=self.environment, check=True, stdin=subprocess.DEVNULL)

    def stop_controller(self) -> None:
        """Jobs go on running without it."""
        self._end(self.folder / "run" / "slurmctld.pid", "slurmctld")

    def impatient(self) -> Path:
        """A configuration with which a command gives up a controller that is away after five seconds."""
        text = (self.folder / "slurm.conf").read_text()
        path = self.folder / "impatient.conf"  # beside the other files that Slurm looks for there
        path.write_text(text.replace("MessageTimeout=30", "MessageTimeout=5"))
        return path

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        shell = f"hostname {node}; exec slurmd -N {node}"
        subprocess.run(["unshare", "--uts", "sh", "-c", shell], env=self.environment, check=True, stdin=subprocess.DEVNULL)

    def kill_node(self, node: str) -> None:
        """Take a node away as a power cut does: its daemons before its jobs, so that nobody reports their end."""
        everything = self.processes(node)
        for process in sorted(everything, key=lambda process: not _command(process).startswith("slurm")):
            _kill(process, signal.SIGKILL)
        self._end(self.folder / "run" / f"slurmd.{node}.pid", "slurmd", signal.SIGKILL)

    def stop(self) -> None:
        """End jobs and daemons, and leave nothing behind."""
        self._end(self.folder / "run" / "slurmctld.pid", "slurmctld", signal.SIGKILL)  # its state is not needed any more
        for node in self.nodes:
            self.kill_node(node)
        self._end(self.folder / "run" / "munged.pid", "munged")
        begin, end = self._marks()
        if begin in (text := HOSTS.read_text()):
            HOSTS.write_text(text[: text.index(begin)] + text[text.index(end) + len(end) :])  # in place: it may be a bind mount
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _start_munge(self) -> None:
        key, run = self.folder / "munge.key", self.folder / "run"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        options = {"key-file": key, "socket": run / "munge.socket", "pid-file": run / "munged.pid", "seed-file": run / "munge.seed"}
        argv = ["munged", *(f"--{name}={value}" for name, value in options.items()), f"--log-file={self.folder / 'log' / 'munged.log'}"]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)

    def _marks(self) -> tuple[str, str]:
        return f"# BEGIN test cluster {self.folder}\n", f"# END test cluster {self.folder}\n"

    def _name_nodes(self) -> None:
        """Names of the nodes, and with an ``i`` those of their "fast network": another address."""
        begin, end = self._marks()
        lines = [f"127.0.0.1 {node}\n127.0.1.{number + 1} {node}i\n" for number, node in enumerate(self.nodes)]
        with HOSTS.open("a") as file:
            file.write("".join([begin, *lines, end]))

    def _configure(self) -> None:
        folder, ports = self.folder, _free_ports(len(self.nodes) + 1)
        megabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20 * 9 // 10
        node_has = f"CPUs={CPUS} RealMemory={megabytes} Gres=gpu:fake:{GPUS}"
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={socket.gethostname().split('.')[0]}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            *("SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge"),
            # A job that was put back waits until its old credential is worth nothing; two minutes by default.
            f"AuthInfo=socket={folder}/run/munge.socket,cred_expire=5",
            *(f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool/%n"),
            *(f"SlurmctldPidFile={folder}/run/slurmctld.pid", f"SlurmdPidFile={folder}/run/slurmd.%n.pid"),
            *(f"SlurmctldLogFile={folder}/log/slurmctld.log", f"SlurmdLogFile={folder}/log/slurmd.%n.log"),
            "SlurmdParameters=config_overrides",  # a node may claim more CPUs than the machine has
            # No cgroups: they are not ours to use everywhere.
            *("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none"),
            *("SwitchType=switch/none", "MpiDefault=none", "MailProg=/bin/true", "PropagateResourceLimits=NONE"),
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "GresTypes=gpu"),
            "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=100000",
            f"TaskProlog={folder}/prolog",
            *("ReturnToService=2", "JobRequeue=1", "MaxArraySize=4", "KillWait=10", "MinJobAge=300"),
            # A busy machine stops everybody for seconds; no test waits for these to run out.
            *("SlurmdTimeout=60", "MessageTimeout=30"),
            *(
                f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} {node_has}"
                for node, port in zip(self.nodes, ports[1:], strict=True)
            ),
            f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=60 State=UP",
            f"PartitionName=short Nodes={','.join(self.nodes)} MaxTime=1 State=UP",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # The nodes share a host: without names of their own, what runs on them would be taken for processes of one node.
        (folder / "prolog").write_text('#!/bin/sh\necho "export CARAML_NODE=$SLURMD_NODENAME"\n')
        (folder / "prolog").chmod(0o755)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\n")
        (folder / "gres.conf").write_text(f"Name=gpu Type=fake File={folder}/dev/gpu[0-{GPUS - 1}]\n")

    def _idle(self) -> int:
        done = subprocess.run(
            ["sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D"], env=self.environment, capture_output=True, text=True, check=False
        )
        return int(done.stdout.strip() or 0)

    def _wait(self, what: str, ready: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                logs = [f"{log.name}: {line}" for log in (self.folder / "log").iterdir() for line in log.read_text().splitlines()[-5:]]
                raise RuntimeError("\n".join([what, *logs]))
            time.sleep(0.1)

    def processes(self, node: str) -> list[int]:
        """Processes of a node: its daemons and whatever its jobs started share its host name's namespace."""
        try:
            namespace = _namespace(int((self.folder / "run" / f"slurmd.{node}.pid").read_text()))
        except (OSError, ValueError):
            return []
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [number for number in numbers if namespace and namespace == _namespace(number) != _namespace(os.getpid())]

    def _end(self, file: Path, program: str, number: int = signal.SIGTERM) -> None:
        """End the daemon of a pid file, if it is that daemon."""
        try:
            process = int(file.read_text())
        except (OSError, ValueError):
            return
        if program not in _command(process):
            return
        _kill(process, number)
        deadline = time.monotonic() + 15
        while program in _command(process):
            if time.monotonic() > deadline:
                _kill(process, signal.SIGKILL)
            time.sleep(0.05)
        file.unlink(missing_ok=True)


def _make_device(path: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # behaves like /dev/null


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to whoever asks for any: other tests do, also while one of our daemons is away. Where it gives
    nearly all, whichever are free."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    places, found = range(1024, given if given > 2048 else 32768), list[int]()
    for port in random.sample(places, len(places)):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))  # as the daemons do
            found.append(port)
        if len(found) == count:
            break
    return found


def _namespace(process: int) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/uts").readlink())
    except OSError:
        return ""


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _kill(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    chosen = Cluster(Path(sys.argv[1]).resolve())
    if sys.argv[2:] == ["stop"]:
        chosen.stop()
    else:
        reason = available()
        if reason is not None:
            sys.exit(reason)
        chosen.start()
        print(f"export SLURM_CONF={chosen.folder}/slurm.conf")
