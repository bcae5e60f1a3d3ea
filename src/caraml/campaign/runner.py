"""The run of a campaign: it claims points, launches them, watches their jobs, and sees that each ends with a record."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import write_file
from caraml.campaign import Campaign, attempt
from caraml.campaign.attempt import PointTask, RunningPoint, finish_attempt
from caraml.campaign.machine import Pace, refuse_login_node, wait_for, writing_below
from caraml.engine.instruments import why_no_sensor
from caraml.launch import JobState, Launcher
from caraml.launch.batch import alike
from caraml.launch.launchers import LocalLauncher, PrintLauncher, launcher_of, refuse_unasked, set_up, setup_script
from caraml.launch.queue import WITHOUT_SLURM, no_cluster
from caraml.launch.slurm import OVER, SlurmLauncher, is_refused
from caraml.results.claim import BUILT_IN, Heartbeat, kind_of, withdraw
from caraml.results.record import STOPPED, Record
from caraml.results.status import DONE, ProgressLine
from caraml.results.store import RECORD, record_of
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.worker.command_record import Sensors, how_it_ran
from caraml.workloads.command import names_of

_POLL_SECONDS = 0.25
_SCHEDULER_POLL_SECONDS = 5.0
_INDEX_SECONDS = 30.0
_MANY = 1000
_NODE_LOST = "NODE_FAIL"
"""What Slurm says of a job one of whose nodes failed."""


class CampaignRun:
    """Gives every point of a campaign its record."""

    def __init__(self, of: Campaign, work: deque[PointTask], total: int) -> None:
        """``work`` is used up, so that ten thousand points are not kept twice; ``total`` counts all points that are to be run."""
        self.of, self.store, self.launcher, self.options = of, of.store, of.launcher, of.options
        self.watcher, self.device, self.say = of.watcher, of.device, of.say
        self._total, self._waiting = total, work
        self._shells = LocalLauncher(brief=True)
        self._others: dict[str, Launcher] = {}
        """Launchers of jobs that an earlier campaign started in another way."""
        self._running: dict[str, RunningPoint] = {}
        self._busy: deque[PointTask] = deque()
        self._foreign: list[tuple[str, Path, str]] = []
        """Label, folder and handle of points whose jobs only a plug-in can look at that was not asked for."""
        self._taken_up: set[str] = set()
        """Handles of jobs of Slurm of which it is not known yet whether they had ended when they were taken up."""
        self._records: dict[int, Record] = {}
        self._said: set[str] = set()
        self._known: set[str] = set()
        """Keys of points that had a result when the campaign began."""
        self._pace = Pace(())
        self._launched = False
        self._needed = {name for one in work for name in one.planned.point.needs}
        """Folders of points that others need."""

    def records(self) -> list[Record]:
        """Run, and return the records in order (of the points that have one, when detached)."""
        with writing_below(self.store.root), ExitStack() as stack:
            self._heart = Heartbeat(self.store.root)
            stack.callback(self._heart.end)
            stack.callback(self.store.index.save)
            self.store.index.load()
            self._expect()
            self._set_up()
            self._loop()
        if self._foreign:
            refuse_unasked(self._foreign)
        return [self._records[index] for index in sorted(self._records)]

    def _expect(self) -> None:
        """Say how long it will take, as far as earlier results tell."""
        if self.launcher.slots is None:
            return
        entries, work = self.store.index.entries, () if self.of.anew else self._waiting
        self._known = {one.key for one in work if (entry := entries.get(one.name)) is not None and entry.row["status"] in DONE}
        earlier = (entry.row for entry in entries.values() if entry.row.get("device") == self.of.system.identity)
        self._pace = Pace((one.planned.point for one in self._waiting if one.planned.skip is None and one.key not in self._known), earlier)
        self._tell_left()

    def _loop(self) -> None:
        saved = time.monotonic()
        try:
            while self._waiting or self._running or self._busy:
                self._launch()
                if self.options.detach and not self._waiting and not self._taken_up:
                    self._see_refused()
                    return
                self._look()
                self._look_at_busy()
                self._heart.beat()
                if time.monotonic() - saved > _INDEX_SECONDS:
                    self.store.index.save()
                    saved = time.monotonic()
        except BaseException as error:
            # What a scheduler holds goes on; what runs here would be without anybody who ends it.
            if self.launcher.slots is not None and self._running:
                for launcher in (self.launcher, self._shells):
                    launcher.cancel([handle for handle, running in self._running.items() if running.launcher is launcher])
                with suppress(OSError):  # a full disk
                    for running in self._running.values():
                        finish_attempt(running.work, running.folder, 1, "failed", f"{STOPPED} ({type(error).__name__})")
            raise
        finally:
            if self.device is not None:
                self.device.release()

    def _set_up(self) -> None:
        """What the site has done before the first point; of scripts that are only printed, by whoever starts them."""
        software, launcher = self.of.system.site.software, self.launcher
        if not isinstance(launcher, PrintLauncher):
            set_up(software, self.store.root)
        elif (script := setup_script(software, self.store.root)) is not None:
            launcher.show(script)

    def _launch(self) -> None:
        slots = self.launcher.slots
        batch: list[tuple[PointTask, Path]] = []
        for _ in range(len(self._waiting)):
            if slots is not None and len(self._running) + len(batch) >= slots:
                break
            work = self._waiting[0]
            if any(one.name in work.point.needs for one, _ in batch):  # it waits for their handles
                self._submit(batch)
                batch = []
            if not self._may_start(work):
                self._waiting.rotate(-1)
                continue
            number = self._open(work, batch)
            if number is not None and work.planned.skip is None and not self._has_device(bool(batch)):
                return
            self._waiting.popleft()
            made = attempt.prepare(self.of, work, number, self._heart.runner) if number is not None else None
            if isinstance(made, Record):
                self._done(work, made, reused=False)
            elif made is not None:
                batch.append((work, made))
            elif number is not None:
                self._busy.append(work)
        if batch:
            self._submit(batch)

    def _may_start(self, work: PointTask) -> bool:
        """Whether what a point needs has ended, or is a scheduler's job; where it did not succeed, the point is to be skipped."""
        if work.planned.skip is not None or not work.point.needs:
            return True
        unsettled = {one.name for one in (*self._waiting, *self._busy)}.intersection(work.point.needs)
        running = {one.work.name: handle for handle, one in self._running.items() if one.work.name in work.point.needs}
        if unsettled or (running and self.launcher.slots is not None):
            return False
        work.after = tuple(running.values())
        if (why := self._unmet(work)) is not None:
            work.planned = replace(work.planned, skip=why)
        return True

    def _unmet(self, work: PointTask) -> str | None:
        """Which point that another needs did not succeed, and does not run either."""
        return attempt.unmet(self.of, set(work.point.needs) - {one.work.name for one in self._running.values()})

    def _has_device(self, ours: bool) -> bool:
        if self.device is None or self._running or ours or self.device.acquire(self._pace.expected(self._waiting[0].planned.point)):
            if self.device is not None and self.device.trouble is not None:
                self._say_once(f"not waiting for other campaigns on this device: {self.device.trouble}")
            return True
        if self.options.no_wait and not self._launched:
            raise EnvironmentUnfitError(f"not waiting: {self.device.queue()}", "leave out --no-wait to wait for it")
        if (news := self.device.news()) is not None:
            self.say(news)
        return False

    def _open(self, work: PointTask, batch: list[tuple[PointTask, Path]]) -> int | None:
        """Look at what a point has; the number of the attempt that must be made, if one must. What was printed and not started is put into
        ``batch`` again."""
        found = attempt.find(self.store, work.name, self._heart.runner, self.options.launcher)
        if found.busy is not None:
            self._busy.append(work)
            self._say_once(f"{work.point.label}: process {found.busy.pid} on {found.busy.host} works on it")
        elif found.adopted is not None and isinstance(self.launcher, PrintLauncher) and attempt.is_printed(*found.adopted):
            attempt.write_again(self.of, work.point, found.adopted[0])
            batch.append((work, found.adopted[0]))
        elif found.adopted is not None:
            self._adopt(work, *found.adopted)
        elif found.record is not None and not self.of.anew and attempt.accepted(found.record, work.planned):
            self._done(work, found.record)
        else:
            return found.attempts + 1
        return None

    def _adopt(self, work: PointTask, folder: Path, handle: str) -> None:
        kind = kind_of(handle)
        if kind not in (*BUILT_IN, self.options.launcher):
            self._foreign.append((work.point.label, folder, handle))
            return
        launcher = self.launcher if kind == self.options.launcher else self._others.setdefault(kind, launcher_of(handle, self.store.root))
        if isinstance(launcher, SlurmLauncher) and not is_refused(handle):
            self._taken_up.add(handle)  # the queue is asked once for all jobs
        elif work.light is None and launcher.poll([handle])[handle].state == "lost":
            self._try_anew(work, folder, None)
            return
        self.watcher.started(work.point, work.index, self._total)
        self._running[handle] = RunningPoint.of(work, folder, handle, launcher)

    def _try_anew(self, work: PointTask, folder: Path, reason: str | None) -> None:
        """A job ended while nobody looked and left no word, as on a full disk: that is noted. Should it come yet, it ends at once."""
        withdraw(folder)
        gone = "its job was gone when the campaign was taken up again"
        finish_attempt(work, folder, 1, "lost", f"{gone}: {reason}" if reason else gone)
        self._waiting.append(work)

    def _is_in_vain(self, handle: str, state: JobState) -> bool:
        """Whether a job that was taken up is lost already, or waits for one that is and never starts; not one whose need has failed, by
        which Slurm ended it."""
        taken_up, work = handle in self._taken_up, self._running[handle].work
        anew = any(one.name in work.point.needs for one in self._waiting)
        waits = state.state == "waiting" and any(self._running[one].work.name in work.point.needs for one in self._taken_up)
        if state.reason != OVER and (anew or not waits):  # what it waits for may be lost, which is not known yet
            self._taken_up.discard(handle)
        if anew:
            return taken_up and state.state in ("lost", "waiting")
        return taken_up and state.state == "lost" and self._unmet(work) is None

    @cached_property
    def _no_sensor(self) -> str | None:
        """Why energy cannot be measured on this node; ``None`` if it can."""
        return why_no_sensor()

    def _submit(self, batch: list[tuple[PointTask, Path]]) -> None:
        self._launched = True
        for work, _ in batch:
            self.watcher.started(work.point, work.index, self._total)
        for launcher, some in (
            (self._shells, [one for one in batch if one[0].light]),
            (self.launcher, [one for one in batch if not one[0].light]),
        ):
            jobs = [work.job(folder, awaited=work.name in self._needed) for work, folder in some]
            if isinstance(launcher, SlurmLauncher):
                for why in filter(None, map(launcher.too_long, dict.fromkeys(alike(job.script) for job in jobs))):
                    self._say_once(why)
            sensors, refused = self._read_sensors(some[0][0]) if launcher is self._shells and some else None, list[str]()
            for (work, folder), handle in zip(some, launcher.submit(jobs) if jobs else [], strict=True):
                self._running[handle] = RunningPoint.of(work, folder, handle, launcher)
                self._running[handle].sensors = sensors
                if work.light is None:  # the others announce themselves, and end in no time
                    refused += [] if attempt.note_handle(folder, handle, self.options.launcher) else [handle]
                    if self.device is not None:
                        self.device.runs(handle)
                self._heart.beat()  # a queue may take long to accept a thousand jobs
            if refused:
                attempt.refuse_handles(launcher, self.options.launcher, refused)

    def _read_sensors(self, work: PointTask) -> Sensors | None:
        """Sensors for a program that the shell alone runs, where it wants energy and there are any."""
        assert work.light is not None
        if not work.light.energy or self._no_sensor is not None:
            return None
        self.watcher.progress(work.point, ProgressLine(t=0.0, phase="idle", item=work.light.item))
        return Sensors(work.light.item, work.point.measure.idle_seconds)

    def _look(self) -> None:
        """Wait a little, then see which jobs have ended."""
        if not self._running:
            if self._waiting or self._busy:
                time.sleep(_POLL_SECONDS)
            return
        wait_for(self._running, _POLL_SECONDS if self.launcher.slots is not None else _SCHEDULER_POLL_SECONDS)
        states = self._poll()
        if isinstance(self.launcher, SlurmLauncher):
            waiting = [handle for handle, state in states.items() if state.state == "waiting"]
            if (news := self.launcher.news(waiting)) is not None:
                self.say(news)
        for handle, state in states.items():
            running = self._running[handle]
            self._tell_progress(running)
            if self._is_in_vain(handle, state):
                if state.state == "waiting":
                    running.launcher.cancel([handle])
                del self._running[handle]
                self._try_anew(running.work, running.folder, state.reason)
            elif state.state in ("ended", "lost"):
                del self._running[handle]
                self._ensure_record(running, state)
            elif self.launcher.slots is not None and running.look(state):
                running.launcher.cancel([handle])
                del self._running[handle]
                limit = running.work.point.measure.timeout_seconds
                finish_attempt(running.work, running.folder, 1, "timeout", f"no result after {limit:g} s")
                self._done(running.work, record_of(running.folder / RECORD), running)
        if not self._running and self.device is not None:
            self.device.release()

    def _tell_progress(self, running: RunningPoint) -> None:
        lines = running.reader.phases() if running.reader is not None else []
        if not lines and running.sensors is not None:
            lines = [running.sensors.line(time.monotonic() - running.since)]
        for line in lines:  # of phases that began and ended since, too
            self.watcher.progress(running.work.point, line)
        if lines:
            self._tell_left()

    def _see_refused(self) -> None:
        """Before a campaign is left: jobs that Slurm refused are nobody's to watch."""
        for handle, running in list(self._running.items()):
            if is_refused(handle):
                del self._running[handle]
                self._ensure_record(running, running.launcher.poll([handle])[handle])

    def _poll(self) -> dict[str, JobState]:
        states: dict[str, JobState] = {}
        for launcher in (self.launcher, self._shells, *self._others.values()):
            handles = [handle for handle, running in self._running.items() if running.launcher is launcher]
            states |= launcher.poll(handles) if handles else {}
        return states

    def _ensure_record(self, running: RunningPoint, state: JobState) -> None:
        """See that an attempt whose job is over has its record."""
        work, folder = running.work, running.folder
        if running.sensors is not None:
            running.sensors.over()
        how = how_it_ran(str(folder)) if work.light is not None else None
        if work.light is not None and how is not None:
            names = names_of(work.point, work.light, folder.absolute(), self.of.suite_folder)
            resident, sensor = self._shells.resident.pop(running.handle, None), self._no_sensor if work.light.energy else None
            record = attempt.record_of_program(running, names, replace(how, extras=self._surroundings), resident, sensor)
            write_file(f"{folder}/{RECORD}", record.__pydantic_serializer__.to_json(record, indent=1), sync="file")
            self._done(work, record, running)
            return
        if state.exit_code == 0:
            attempt.wait_until_visible(folder)
        if state.state == "lost" and (why := self._unmet(work)) is not None:  # Slurm ends what waits for a job that failed
            finish_attempt(work, folder, 1, "skipped", why)
        if state.state == "lost":
            withdraw(folder)  # should it come yet, it ends at once: the point is measured again
        # Where a node was lost, what the ranks on the others say is of that.
        if state.state == "lost" and (not (folder / "failure.json").exists() or _NODE_LOST in (state.reason or "")):
            finish_attempt(work, folder, 1, "lost", state.reason or "its job is gone")
        finish_attempt(work, folder, state.exit_code or 0)
        self._done(work, record_of(folder / RECORD), running)

    def _look_at_busy(self) -> None:
        """Take up points that others had, once they are done or dead."""
        if self._running and self.launcher.slots is not None:
            return
        for _ in range(len(self._busy)):
            work = self._busy.popleft()
            found = attempt.find(self.store, work.name, self._heart.runner, self.options.launcher)
            if found.record is not None:
                self._done(work, found.record)
            elif found.adopted is not None:
                self._adopt(work, *found.adopted)
            elif found.busy is not None:
                self._busy.append(work)
            else:
                self._waiting.append(work)

    def _done(self, work: PointTask, record: Record, running: RunningPoint | None = None, *, reused: bool | None = None) -> None:
        """A point has its record: from what was ``running``, or else one that it had before, unless ``reused`` says otherwise."""
        if record.unreadable:  # a campaign knows its point
            record = record.model_copy(update={"point": work.point})
        # Of very many records only the summary_record stays in memory; the store has the rest.
        self._records[work.index] = record if self._total <= _MANY else attempt.summary_record(work, record)
        self.store.index.note(work.name, record)
        self.watcher.finished(record, running is None if reused is None else reused)
        if running is not None and running.sensors is not None:
            running.sensors.close()
        if work.planned.skip is None and work.key not in self._known:
            self._pace.ended(work.point, None if running is None else time.monotonic() - running.since)
            self._tell_left()

    def _tell_left(self) -> None:
        """Say how long all points will take yet where they run one after another; when a scheduler starts them nobody knows."""
        if self.launcher.slots is None:
            return
        now = time.monotonic()
        self.watcher.left(self._pace.left_text([(running.work.point, now - running.since) for running in self._running.values()]))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    @cached_property
    def _surroundings(self) -> dict[str, Any]:
        """System and environment as they were when the first short run ended; asking anew for each would take longer than the run."""
        return {"system": detect().model_dump(mode="json"), "environment": environment()}


def run_campaign(campaign: Campaign) -> list[Record]:
    """Run what has no result yet; returns the records of the points, in order (of those that have one, when detached). Raises
    ``InputError`` where nothing can be run, or others could put their programs in the place of the suite's."""
    if campaign.options.launcher == "local" and not campaign.options.here:
        refuse_login_node(campaign.command)
    if isinstance(campaign.launcher, SlurmLauncher) and campaign.options.launcher == "slurm" and (why := no_cluster()) is not None:
        raise EnvironmentUnfitError(why, WITHOUT_SLURM)
    plan, only = campaign.plan(), campaign.options.only
    chosen = campaign.chosen(plan)
    campaign.store.make()
    points = [(planned.key, planned.point.label) for planned in plan.points]
    whole = len(chosen) == len(points)
    if only is not None:
        chosen = [planned for planned in chosen if planned.key in only]
        if not chosen:
            what = f"no point of suite {campaign.suite.suite.name} has a key that was asked for"
            raise InputError(f"{what}: the suite, the machine or a version is another now", campaign.command)
    if unknown := dict.fromkeys(sentence for planned in chosen for sentence in attempt.lacking(campaign, planned)):
        raise InputError("; ".join(unknown), f"export what is missing, or {campaign.command}")
    campaign.store.remember(campaign.listing(points), anew=campaign.again and only is None and whole)
    work = deque(PointTask.of(campaign, index, planned) for index, planned in enumerate(chosen))
    return CampaignRun(campaign, work, len(work)).records()
