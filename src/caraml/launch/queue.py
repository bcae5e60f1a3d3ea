"""Asking Slurm: its commands, and what their answers mean. One call for all jobs; accounting is never needed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from caraml.base.errors import EnvironmentUnfitError
from caraml.system.files import read

Standing = Literal["waiting", "running", "over"]

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_OVER = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED"),
}
_OF_SLURM = re.compile(r"(SLURM|SBATCH|SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL)_")
_OF_THE_CLUSTER = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}
_CALL_SECONDS = 60.0
SUBMIT_SECONDS = 180.0
"""``sbatch`` itself tries again for two minutes where the controller has no room for a job."""
_ANSWER_SECONDS = 10.0
"""How long a controller is waited for that need not be there."""
_IDS_PER_CALL = 1000
NO_CONTACT = re.compile(r"unable to contact slurm controller|slurm temporarily unable to accept job", re.IGNORECASE)
"""What Slurm says while its controller is down."""
WITHOUT_SLURM = "run on a login node of the machine, or take `--launcher print` for the scripts alone"


@dataclass(frozen=True)
class Answer:
    """What Slurm says of one job: where it stands, Slurm's own word for that, and why, if it says."""

    standing: Standing
    state: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


_WHY = {
    "None": "Slurm has not looked at them yet",
    "Priority": "jobs of higher priority come first",
    "Resources": "next in turn, as soon as nodes are free",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "a job that had to succeed first has not, so never",
    "BeginTime": "not to start before a time that was set, as after being put back into the queue",
    "JobArrayTaskLimit": "as many tasks of the array run as --throttle allows",
    "JobHoldMaxRequeue": "put back into the queue as often as Slurm does it by itself, and held; scontrol release starts them",
    "job": "put back into the queue and held; scontrol release starts them",
    "launch": "could not be started on their nodes, and are held; scontrol release starts them",
    "JobHeldUser": "held by their user; scontrol release starts them",
    "JobHeldAdmin": "held by an administrator",
    "PartitionTimeLimit": "longer than the partition allows, so never",
    "PartitionNodeLimit": "more or fewer nodes than the partition allows, so never",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "ReqNodeNotAvail": "nodes that they need are down, drained or reserved",
    "Reservation": "waiting for their reservation",
    "Licenses": "waiting for licenses",
    "BadConstraints": "no node has what they ask for, so never",
}
"""Slurm's most frequent reasons in words. Of the others the word itself says enough, or its manual (``squeue``, job reason codes)."""
_LIMITS = (("QOS", "a limit of the QOS"), ("Assoc", "a limit of the account"))
"""The same by how the word begins."""


@dataclass(frozen=True)
class Turn:
    """What the queue says of a job that has not started. What nobody knows is ``None``."""

    reason: str
    """Slurm's own word."""
    place: int | None
    """1 for the job of the highest priority in its partition; ``None`` for one that is held, and where others' jobs are hidden."""
    among: int
    """Jobs that wait in that partition."""
    start: str | None
    """When Slurm expects to start it, in its own time zone."""

    @property
    def why(self) -> str:
        """The reason in words, with Slurm's own."""
        word = re.split(r"[,_( ]", self.reason)[0]
        limit = next((text for begin, text in _LIMITS if word.startswith(begin)), None)
        words = _WHY.get(word) or limit
        return f"{words} ({self.reason})" if words is not None and word != "None" else words or self.reason

    def __str__(self) -> str:
        place = "place unknown" if self.place is None else f"place {self.place:,} of {self.among:,} by priority"
        return f"{self.why}; {place}; {f'expected to start {self.start}' if self.start else 'Slurm does not say when it starts'}"


class SilentError(Exception):
    """The controller did not answer; nothing is known."""


def call(
    argv: Sequence[str], text: str | None = None, seconds: float = _CALL_SECONDS, keep: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands, with ``text`` as its input. The job that this process may be running in has no say in it, nor have
    variables that change what the commands do (``SQUEUE_PARTITION`` hides jobs), but for those to ``keep``. Raises
    ``EnvironmentUnfitError`` where Slurm is not installed here."""
    kept = {*_OF_THE_CLUSTER, *keep}
    inherited = {name: value for name, value in os.environ.items() if not _OF_SLURM.match(name) or name in kept}
    told = {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
    environment = inherited if argv[0] == "sbatch" else {**inherited, **told}  # which a job would have, too
    given = text if text is None else text.encode()
    try:
        done = subprocess.run(argv, input=given, capture_output=True, timeout=seconds, env=environment, check=False)  # noqa: S603 -- Slurm's programs; what comes from files is checked by results.claim; no shell
    except FileNotFoundError:
        raise EnvironmentUnfitError(f"{argv[0]} is not installed here", WITHOUT_SLURM) from None
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        return subprocess.CompletedProcess(list(argv), 1, "", f"{said}\n{argv[0]} did not answer within {seconds:g} s")
    answer, objection = (some.decode(errors="replace") for some in (done.stdout, done.stderr))  # a site's own checks may say anything
    return subprocess.CompletedProcess(done.args, done.returncode, answer, objection)


def in_queue() -> dict[str, Answer]:
    """This user's jobs that Slurm still remembers, ended ones included; array tasks by ``JOB_TASK``. Raises :class:`SilentError`."""
    done = call(["squeue", "--me", "--states=all", "--array", "--noheader", "--format=%i|%T|%r"])
    if done.returncode:
        raise SilentError(complaint(done.stderr))
    return {name: answer for name, answer in map(_answer, done.stdout.splitlines()) if name}


def turns(seconds: float = _CALL_SECONDS) -> dict[str, Turn]:
    """This user's jobs that have not started; array tasks by ``JOB_TASK``. Waits at most ``seconds`` for an answer.

    The place is that by priority among all jobs of the partition that are not held; a scheduler that fills gaps may start later ones first.
    Raises ``SilentError`` where the controller does not answer.
    """
    # Those that Slurm holds after they had begun, as in state SPECIAL_EXIT, are not among the pending ones.
    argv = ["squeue", "--array", "--noheader", "--format=%i|%P|%Q|%S|%T|%r"]
    own, everybody = (call([*argv, *of], seconds=seconds) for of in (["--me", "--states=all"], ["--states=PENDING"]))
    if own.returncode or everybody.returncode:
        raise SilentError(complaint(own.stderr or everybody.stderr))
    waiting: dict[str, list[tuple[int, int]]] = {}
    for name, partitions, priority, *_ in _rows(everybody.stdout):
        for partition in partitions.split(",") if int(priority) else ():
            waiting.setdefault(partition, []).append(_rank(name, priority))
    for some in waiting.values():
        some.sort()
    settings = call(["scontrol", "show", "config"], seconds=seconds).stdout if own.stdout and shutil.which("scontrol") else ""
    hidden = re.search(r"^PrivateData\s*=.*\bjobs\b", settings, re.MULTILINE)
    found = {}
    for name, partitions, priority, start, state, reason in _rows(own.stdout):
        if state not in _WAITING - {"CONFIGURING"}:
            continue
        lists = [waiting[one] for one in partitions.split(",") if one in waiting] if int(priority) and not hidden else []
        place, among = min(((bisect_left(some, _rank(name, priority)) + 1, len(some)) for some in lists), default=(None, 0))
        found[name] = Turn(reason, place, among, start.replace("T", " ") if start != "N/A" else None)
    return found


def _rows(text: str) -> list[list[str]]:
    """The lines that :func:`turns` asks for, without others: of clusters by name there is a heading for each."""
    found = (line.strip().split("|", 5) for line in text.splitlines())
    return [row for row in found if len(row) == 6 and row[0][:1].isdecimal() and row[2].isdecimal()]


def _rank(name: str, priority: str) -> tuple[int, int]:
    """Of jobs of one priority the older comes first."""
    return -int(priority), int(re.split(r"\D", name)[0])


def waiting_text(jobs: Collection[str]) -> str | None:
    """Why those of some jobs wait that do, in a sentence: at which place, and when Slurm expects to start them; ``None`` if none do."""
    try:
        known = turns()
    except SilentError as error:
        return f"where the jobs are in the queue is unknown: Slurm does not answer ({error})"
    found = [known[name] for name in jobs if name in known]
    if not found:
        return None
    counts = Counter(one.why for one in found).most_common()
    reasons = "; ".join(f"{count:,} x {why}" if len(counts) > 1 else why for why, count in counts)
    first = min((one for one in found if one.place is not None), key=lambda one: one.place or 0, default=None)
    place = "their places are unknown" if first is None else f"the first has place {first.place:,} of {first.among:,} by priority"
    starts = sorted(one.start for one in found if one.start)
    when = f"Slurm expects to start the first {starts[0]}" if starts else "Slurm does not say when it starts them"
    when += f", and the last {starts[-1]}" if len(starts) == len(found) > 1 and starts[-1] != starts[0] else ""
    return f"{len(found):,} job{'s wait' if len(found) > 1 else ' waits'} in the queue: {reasons}; {place}; {when}"


def in_accounting(jobs: Iterable[str]) -> Mapping[str, Answer]:
    """What the accounting database says of jobs that the queue has forgotten, so that they are over; nothing where there is no database."""
    if shutil.which("sacct") is None:
        return {}
    names = list(dict.fromkeys(name.partition("_")[0] for name in jobs))  # tasks that never began have no lines of their own
    answers: dict[str, Answer] = {}
    for begin in range(0, len(names), _IDS_PER_CALL):
        some = ",".join(names[begin : begin + _IDS_PER_CALL])
        done = call(["sacct", "--parsable2", "--noheader", "--allocations", "--format=JobID,State,Reason", f"--jobs={some}"])
        if done.returncode:
            return {}
        for name, said in map(_answer, done.stdout.splitlines()):  # the end of some was never told, as when the database was away
            stale = Answer("over", said.state, "by accounting alone: the controller has forgotten it")
            answers |= dict.fromkeys(_tasks(name), said if said.standing == "over" else stale)
    return answers


def _tasks(name: str) -> list[str]:
    """The jobs of a line of accounting: ``12_[0-2,7%4]`` are tasks that never began."""
    found = re.fullmatch(r"(\d+_)\[([\d,-]+)(?:%\d+)?\]", name)
    if found is None:
        return [name]
    ranges = [part.split("-") for part in found[2].split(",") if part.strip("-")]
    return [f"{found[1]}{task}" for ends in ranges for task in range(int(ends[0]), int(ends[-1]) + 1)]


def array_limit(*, ask: bool = True) -> int:
    """Most tasks of an array here; where nobody can be asked, Slurm's own default. A site may allow fewer tasks than numbers of tasks."""
    answer = call(["scontrol", "show", "config"]).stdout if ask and shutil.which("scontrol") else ""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)$", answer, re.MULTILINE)
    tasks = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", answer, re.MULTILINE)
    limit = max(int(found[1]) if found else 1001, 2) - 1
    return min(limit, max(int(tasks[1]), 1)) if tasks else limit


def silence() -> str | None:
    """Why no cluster can be asked from here; ``None`` if one answers."""
    if shutil.which("sinfo") is None:
        return "Slurm is not installed here"
    done = call(["sinfo", "--noheader", "--format=%P"])
    return None if done.returncode == 0 else f"no cluster answers here ({complaint(done.stderr).rpartition('; ')[2]})"


def no_cluster() -> str | None:
    """Why nothing can be submitted from here; ``None`` where a cluster answers, or its controller is only down just now."""
    why = silence()
    return None if why is None or NO_CONTACT.search(why) else why


def login_node() -> str | None:
    """Why work should not be done on this host; ``None`` inside an allocation, where no Slurm answers, and on the only node of a cluster
    of one's own."""
    in_step = any("/job_" in line for line in (read(Path("/proc/self/cgroup")) or "").splitlines())  # by ssh: without Slurm's variables
    if in_step or os.environ.get("SLURM_JOB_ID") or shutil.which("sinfo") is None:
        return None
    done = call(["sinfo", "--noheader", "--format=%n"], seconds=_ANSWER_SECONDS)
    nodes, host = set(done.stdout.split()), socket.gethostname().partition(".")[0]
    is_node = any(name.partition(".")[0] == host for name in nodes)
    if done.returncode or not nodes or (is_node and len(nodes) == 1):
        return None
    what = f"one of the {len(nodes):,} nodes" if is_node else f"none of the {len(nodes):,} nodes"
    return f"{host} is {what} of a Slurm cluster, and this is no job"


def minutes_of(partition: str | None) -> float | None:
    """Longest wall time of a partition, or of the longest of several, (``None``: of the default one) in minutes; ``None`` where there is no
    limit or nobody knows it."""
    done = call(["sinfo", "--noheader", "--format=%P|%l", *([f"--partition={partition}"] if partition else [])])
    lines = (line.strip().partition("|") for line in done.stdout.splitlines())
    limits = [_minutes(limit) for name, _, limit in lines if partition is not None or name.endswith("*")]
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def _minutes(limit: str) -> float | None:
    """``1-02:03:04``, ``02:03:04``, ``03:04`` or ``infinite``."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60


def complaint(text: str) -> str:
    """What a command said when it refused, in one line and without its own name."""
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try ")) or "no message"


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _answer(line: str) -> tuple[str, Answer]:
    """One line of ``JOB|STATE|REASON``. ``CANCELLED by 1000`` is how sacct says who did it."""
    name, _, rest = line.strip().partition("|")
    state, _, reason = rest.partition("|")
    word = state.split(" ")[0]
    standing: Standing = "waiting" if word in _WAITING else "over" if word in _OVER else "running"
    return name, Answer(standing, state, reason if reason not in ("", "None") else None)
