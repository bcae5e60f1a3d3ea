"""Points as Slurm jobs.

Where a job stands is read from the files that it writes, then from the queue, then from accounting where there is one. A job that is gone
and left no word is ``lost``, with what Slurm says of it.
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from caraml.base.files import make_folder, there, touch, write_file, write_once
from caraml.base.limits import tail
from caraml.launch import Elsewhere, Job, JobState, batch, queue
from caraml.launch.batch import CANCELLED, EXIT, SLURM_LOG, SlurmOptions, step_name
from caraml.launch.script import Shell
from caraml.results.finish import LOG
from caraml.results.store import RECORD
from caraml.system.model import Scheduler

REFUSED = "refused"
"""Stands in a handle instead of a job's number when ``sbatch`` refused the script; the file of that name says why."""
OVER = "it is over; waiting for its files to appear"
_PACKED = "pack"
_RETRY_SECONDS = 5.0
_IDS_PER_CALL = 500
_LOOKS, _LOOK_SECONDS = 10, 0.3
_QUEUE_SECONDS = (60.0, 960.0)
"""How often the whole queue is looked at, at first and after hours: that of a large machine has thousands of jobs."""
_TOO_MANY = re.compile(r"(Max|Grp)Submit|Invalid job array")
"""In what Slurm says where an account, a user or a QOS has as many jobs in the queue as it may (``AssocMaxSubmitJobLimit``), or an array is
too long."""
_FILLED_IN = ("account", "partition", "qos", "constraint", "reservation")
_LAST_WORD = re.compile(r"error: \*\*\* (.*) \*\*\*")


class SlurmLauncher:
    """Queues jobs with ``sbatch``. A handle is ``slurm:JOB:FOLDER``; JOB is a number, ``NUMBER_TASK`` of an array, or ``NUMBER+pack-N``.

    ``folder`` is where the scripts and logs of arrays and packs go; ``elsewhere``, for scripts that are only printed, how the machine on
    which they will be submitted has it. That machine cannot be asked.
    """

    slots = None

    def __init__(
        self,
        scheduler: Scheduler,
        folder: Path,
        options: SlurmOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        asks: bool = True,
        elsewhere: Elsewhere | None = None,
    ):
        self.scheduler, self.options, self._folder, self._clock = scheduler, options or SlurmOptions(), folder.resolve(), clock
        self._asks, self._there = asks, elsewhere.path if elsewhere is not None else Path.resolve
        self._limits: dict[str | None, float | None] = {}
        """Minutes after which jobs of a partition end, as far as it was asked for."""
        self._missing_since: dict[str, float] = {}
        self._last_words: dict[str, queue.Answer] = {}
        """What Slurm said of jobs that are over; it may forget them before their files had time to appear."""
        self._said, self._next_look, self._pause = "", 0.0, _QUEUE_SECONDS[0]
        """What was said of the queue, when to look at it again, and how long to wait after that."""

    # -- submitting ----------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> Iterator[str]:
        """Queue the scripts; a handle for each, in order, as soon as it is known. What ``sbatch`` refuses gets a handle that polls as
        ``lost`` with its message."""
        handles: dict[Path, str] = {}
        deadline, told = self._clock() + self.options.patience_seconds, 0
        for group, script in self.scripts(jobs):
            for part, submitted, number, refusal in self._queued(group, script, deadline):
                for index, job in enumerate(part):
                    if refusal is not None:
                        write_file(job.folder / REFUSED, refusal)
                    handles[job.folder] = f"slurm:{self._name(number, index, part, submitted)}:{job.folder.resolve()}"
                while told < len(jobs) and jobs[told].folder in handles:
                    yield handles[jobs[told].folder]
                    told += 1

    def _queued(self, group: list[Job], script: Path, deadline: float) -> Iterator[tuple[list[Job], Path, str | None, str | None]]:
        """Submit a group of jobs. An array with more tasks than may be in the queue is cut until a part of it fits; what does not fit even
        alone is refused, and so is the rest."""
        rest, size = group, len(group)
        while rest:
            part = rest[:size]
            number, refusal = self._sbatch(self.command(script, part), deadline)
            if refusal is not None and _TOO_MANY.search(refusal):
                if len(part) > 1 and not script.name.startswith(_PACKED):
                    size = len(part) // 2
                    script = self._script(rest[:size])
                    continue
                part, refusal = rest, f"{refusal}; the same command submits it once others have ended"
            rest = rest[len(part) :]
            yield part, script, number, refusal
            script = self._script(rest[:size]) if rest else script

    def scripts(self, jobs: Sequence[Job]) -> list[tuple[list[Job], Path]]:
        """The scripts to submit and the jobs in each; writes those of arrays and packs."""
        if self.options.pack > 1:
            alone, rest = ([job for job in jobs if bool(job.awaited or job.after) == alone] for alone in (True, False))
            groups = [[job] for job in alone] + batch.packs(
                rest, self.scheduler.model_copy(update={"max_minutes": self._longest()}), self.options.pack
            )
            return [(group, self._script(group)) for group in groups]
        if self.options.one_at_a_time:
            return [([job], job.script) for job in jobs]
        kinds: dict[tuple[str, ...], list[Job]] = {}
        for job in jobs:
            # Each that others wait for has a number of its own.
            kinds.setdefault((*batch.alike(job.script), *job.after, *([str(job.folder)] if job.awaited else [])), []).append(job)
        limit = queue.array_limit(ask=self._asks) if any(len(alike) > 1 for alike in kinds.values()) else 1
        size = min(self.options.array_size, limit)
        groups = [alike[begin : begin + size] for alike in kinds.values() for begin in range(0, len(alike), size)]
        return [(group, self._script(group)) for group in groups]

    def _longest(self) -> int | None:
        """Minutes after which jobs end here. A site that does not say so may have a limit all the same: a longer job would never start."""
        asks = self._asks and shutil.which("sinfo") is not None
        longest = self.scheduler.max_minutes or (queue.minutes_of(self.scheduler.partition) if asks else None)
        return None if longest is None else int(longest)

    def command(self, script: Path, group: Sequence[Job] = ()) -> list[str]:
        """The command that submits the script of a group of jobs. What waits for a job that fails is ended by Slurm."""
        alone = self.options.one_at_a_time
        first = dict.fromkeys(_job(handle) for job in group for handle in job.after)
        waits = [*(["singleton"] if alone else []), *([":".join(["afterok", *first])] if first else [])]
        options = [*([f"--dependency={','.join(waits)}"] if waits else []), *(["--kill-on-invalid-dep=yes"] if first else [])]
        options = [Shell(f'"{option}"') if "$" in option else option for option in options]  # a number that is not known yet
        return ["sbatch", "--parsable", *options, *([f"--job-name={self.options.name}"] if alone else []), str(self._there(script))]

    def check(self, text: str) -> str | None:
        """Slurm's own objection to a script; ``None`` when it would start it some day. Nothing is queued."""
        if (why := self.too_long(batch.options_of(text))) is not None:
            return why
        done = queue.call(["sbatch", "--test-only"], text, keep=_unsaid(batch.options_of(text)))
        return None if done.returncode == 0 else queue.complaint(done.stderr)

    def too_long(self, options: Sequence[str]) -> str | None:
        """Where a site does not set EnforcePartLimits, Slurm takes a job that is too long for its partition, and never starts it: that."""
        asked = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        partition, minutes = asked.get("partition"), asked.get("time", "")
        if partition not in self._limits:
            self._limits[partition] = queue.minutes_of(partition)
        limit = self._limits[partition]
        if limit is None or not minutes.isdecimal() or int(minutes) <= limit:
            return None
        what = f"{minutes} min are more than the partition's time limit of {limit:g} min; such a job would wait for ever"
        return f"{what}: write max_minutes = {limit:.0f} below [site.scheduler], or lower measure.timeout_seconds"

    def _sbatch(self, command: list[str], deadline: float) -> tuple[str | None, str | None]:
        """The job's number, or why there is none. A controller that is down is waited for: it has certainly not taken the job."""
        while True:
            done = queue.call(command, seconds=queue.SUBMIT_SECONDS, keep=_unsaid(batch.options_of(Path(command[-1]))))
            if done.returncode == 0:
                numbers = re.findall(r"^\s*(\d+)(?:;\S+)?\s*$", done.stdout, re.MULTILINE)
                found = queue.last_line(done.stdout) or "nothing"
                return (numbers[-1], None) if numbers else (None, f"sbatch answered {found!r}, expected the number of a job")
            if not queue.NO_CONTACT.search(done.stderr) or self._clock() > deadline:
                return None, f"sbatch refused {command[-1]}: {queue.complaint(done.stderr)}"
            time.sleep(_RETRY_SECONDS)

    @staticmethod
    def _name(number: str | None, index: int, group: list[Job], script: Path) -> str:
        if number is None:
            return REFUSED
        if len(group) == 1:
            return number
        return f"{number}+{script.stem}" if script.name.startswith(_PACKED) else f"{number}_{index}"

    def _script(self, group: list[Job]) -> Path:
        """The script to submit for a group of jobs; that of an array or a pack is written: one that was submitted is never written over,
        the same one, printed again, keeps its name."""
        if len(group) == 1:
            return group[0].script
        logs, limits = self._there(self._folder), {self._there(job.folder): job.timeout for job in group}
        if self.options.pack > 1:
            head = batch.shared_head(group, self.scheduler)
            kind, text = _PACKED, batch.pack_script(limits, head, self.options, logs, self.scheduler.signal_seconds)
        else:
            kind, text = "array", batch.array_script(list(limits), batch.alike(group[0].script), self.options, logs)
        make_folder(self._folder)
        for number in itertools.count(1):
            path = self._folder / f"{kind}-{number}.sh"
            if write_once(path, text) or (not self._asks and path.read_text(encoding="utf-8") == text):
                break
        return path

    # -- watching ------------------------------------------------------------------------------------------------------

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        """States from files, then one look at the queue, then accounting for jobs that the queue has forgotten."""
        states = {handle: state for handle in handles if (state := self._from_files(handle)) is not None}
        open_handles = [handle for handle in handles if handle not in states]
        if not open_handles:
            return states
        try:
            answers = queue.in_queue()
        except queue.SilentError as error:
            return states | {handle: self._unknown(handle, str(error)) for handle in open_handles}
        gone = {_job(handle) for handle in open_handles} - answers.keys()
        if gone:
            answers |= queue.in_accounting(sorted(gone))
        return states | {handle: self._from_slurm(handle, answers.get(_job(handle))) for handle in open_handles}

    def news(self, handles: Sequence[str]) -> str | None:
        """What to say of these jobs, which have not started; ``None`` where that has not changed, or is not looked at yet."""
        if self._clock() < self._next_look or not (handles or self._said):
            return None
        before, self._said = self._said, (self.waiting_text(handles) or "") if handles else ""
        self._next_look, self._pause = self._clock() + self._pause, min(2 * self._pause, _QUEUE_SECONDS[1])
        return None if self._said == before else self._said or "no job waits in the queue any more"

    @staticmethod
    def waiting_text(handles: Iterable[str]) -> str | None:
        """Why those of these jobs wait that have not started, at which place in the queue, and how long; ``None`` if all have."""
        return queue.waiting_text(dict.fromkeys(map(_job, handles)))

    @staticmethod
    def _from_files(handle: str) -> JobState | None:
        folder = _folder(handle)
        if _job(handle) == REFUSED:
            refusal = folder / REFUSED
            return JobState("lost", reason=tail(refusal) if refusal.exists() else "sbatch refused its script")
        try:
            return JobState("ended", int(tail(folder / EXIT)))
        except (OSError, ValueError):  # not there, or being written just now
            return None

    @staticmethod
    def _unknown(handle: str, why: str) -> JobState:
        started = (_folder(handle) / LOG).exists()
        return JobState("running" if started else "waiting", reason=f"Slurm does not answer: {why}")

    def _from_slurm(self, handle: str, answer: queue.Answer | None) -> JobState:
        folder = _folder(handle)
        if answer is not None and answer.standing != "over":
            self._missing_since.pop(handle, None)
            self._last_words.pop(handle, None)
            if answer.standing == "waiting" or not (folder / LOG).exists():  # in a pack, its turn has not come yet
                return JobState("waiting", reason=answer.reason)
            return JobState("running")
        since = self._missing_since.setdefault(handle, self._clock())
        if answer is not None:
            self._last_words[handle] = answer
        answer = self._last_words.get(handle)
        if there(folder / RECORD):
            return JobState("ended", 0)
        if self._clock() - since < self.options.grace_seconds:
            return JobState("running", reason=OVER)
        said = str(answer) if answer is not None else "Slurm has forgotten it, and no accounting remembers it"
        words = self._log_line(handle)
        if not words and (folder / EXIT).exists():
            words = "nothing, and its exit code could not be written, as where the disk is full"
        return JobState("lost", reason=f"job {_job(handle)}: {said}" + (f"; its log ends: {words}" if words else ""))

    def _log_line(self, handle: str) -> str:
        """What Slurm wrote into the job's log when it ended it, or the log's last line."""
        for log in (_folder(handle) / SLURM_LOG, self._folder / f"{_job(handle)}.log"):
            if log.exists():
                text = tail(log)
                found = _LAST_WORD.findall(text)
                if found or text.strip():
                    return found[-1] if found else queue.last_line(text)
        return ""

    # -- ending --------------------------------------------------------------------------------------------------------

    def cancel(self, handles: Sequence[str]) -> None:
        """End jobs, queued or running. A job that runs several points goes on with those that were not named."""
        alone = sorted({_job(handle) for handle in handles if not _pack_of(handle)} - {REFUSED})
        packed: dict[tuple[str, str], list[Path]] = {}
        for handle in handles:
            if pack := _pack_of(handle):
                touch(_folder(handle) / CANCELLED)
                packed.setdefault((_job(handle), pack), []).append(_folder(handle))
        for (job, pack), folders in packed.items():
            mates = batch.points_of(self._folder / f"{pack}.sh")
            everything = all((mate / CANCELLED).exists() or (mate / EXIT).exists() for mate in mates)
            steps = [job] if everything else _steps(job, folders)
            alone += steps
            if not steps and any(map(_runs, folders)):  # a program is no step of its job
                queue.call(["scancel", "--quiet", "--batch", f"--signal={batch.LOOK}", "--", job])
        for begin in range(0, len(alone), _IDS_PER_CALL):
            queue.call(["scancel", "--quiet", "--", *alone[begin : begin + _IDS_PER_CALL]])


def _unsaid(options: Sequence[str]) -> list[str]:
    """Variables by which users give ``sbatch`` what a script leaves open; what it says they would replace, too."""
    return [f"SBATCH_{key.upper()}" for key in _FILLED_IN if not any(line.startswith(f"--{key}=") for line in options)]


def is_refused(handle: str) -> bool:
    """Whether ``sbatch`` refused the script of a handle, so that there is no job."""
    return handle.startswith(f"slurm:{REFUSED}:")


def _steps(job: str, folders: Sequence[Path]) -> list[str]:
    """Steps of a job that run one of these points now; a step is called after its point. One that is being started is waited for."""
    names = {step_name(folder) for folder in folders}
    found: list[str] = []
    for _ in range(_LOOKS):
        done = queue.call(["squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i|%j"])
        found = [step for step, _, name in (line.strip().partition("|") for line in done.stdout.splitlines()) if name in names]
        if found or not any(map(_runs, folders)):
            break
        time.sleep(_LOOK_SECONDS)
    return found


def _runs(folder: Path) -> bool:
    return (folder / LOG).exists() and not (folder / EXIT).exists()


def _pack_of(handle: str) -> str:
    """The pack's script without its ending; empty for a job of its own."""
    return handle.split(":", 2)[1].partition("+")[2]


def _job(handle: str) -> str:
    return handle.split(":", 2)[1].partition("+")[0]


def _folder(handle: str) -> Path:
    return Path(handle.split(":", 2)[2])
