"""Cast: the processes of a storm: who is at work, who comes for one that went."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from processes import Child
from storm.readers import kinds
from storm.roles import POOL, WRITER, Post, work
from storm.usage import children_of, read_memory_file

HANG_SECONDS = 180.0  # documented: cache.lock is waited for 60 s; nobody is stopped for longer than a few


@dataclass
class Actor:
    """One process; `came` is in monotonic seconds."""

    post: Post
    child: Child
    came: float

    @property
    def is_reader(self) -> bool:
        return self.post.kind not in (WRITER, POOL)

    def workers(self) -> list[int]:
        """Processes of its own, but for what looks after their semaphores."""
        return [
            pid
            for pid in children_of(self.child.pid)
            if "resource_tracker" not in read_memory_file(pid, "cmdline")
        ]

    def idle_seconds(self) -> float:
        """For how long it has counted nothing."""
        last = self.post.tally.stat().st_mtime if self.post.tally.exists() else 0.0
        return min(time.time() - last, time.monotonic() - self.came)


class Cast:
    """Starts processes, and finds those that ended.

    Args:
        cache, folder: the cache's folder, and one for what the storm itself writes.
        chance: decides who comes.
        parts: how many of each mortal kind; "reader" is of any kind that reads.
    """

    def __init__(self, cache: Path, folder: Path, chance: random.Random, parts: dict[str, int]) -> None:
        self._cache, self._folder, self._chance, self._parts = cache, folder, chance, parts
        self.seed = chance.randrange(1 << 30)
        self.actors: list[Actor] = []
        self.started = 0
        self.failures: list[str] = []
        (folder / "tallies").mkdir()

    def start(self, kind: str, *, is_elder: bool = False) -> Actor:
        self.started += 1
        post = Post(kind, self.started, self._cache, self._folder, self.seed, is_elder)
        actor = Actor(post, Child(work, post), time.monotonic())
        self.actors.append(actor)
        return actor

    def fill(self) -> None:
        """Have as many of each kind as there are to be."""
        mortals = [actor for actor in self.actors if not actor.post.is_elder]
        for part, wanted in self._parts.items():
            there = sum(a.is_reader if part == "reader" else a.post.kind == part for a in mortals)
            for _ in range(wanted - there):
                self.start(self._chance.choice(kinds()) if part == "reader" else part)

    def bury(self) -> None:
        """Take leave of those that ended; one that ended by itself failed, or had been told to leave."""
        for actor in list(self.actors):
            if not actor.child.is_alive():
                self._end(actor, 1.0)

    def kill(self, actor: Actor) -> None:
        """SIGKILL, to the process alone."""
        actor.child.kill()
        self.actors.remove(actor)

    def end(self) -> None:
        """Have all end by themselves, and hear what they have to say."""
        (self._folder / "stop").touch()
        deadline = time.monotonic() + HANG_SECONDS
        for actor in list(self.actors):
            self._end(actor, max(1.0, deadline - time.monotonic()))

    def _end(self, actor: Actor, seconds: float) -> None:
        self.actors.remove(actor)
        try:
            with actor.child as child:
                self.failures += [f"{actor.post}: {text}" for text in child.result(seconds)]
        except AssertionError as error:
            self.failures.append(f"{actor.post}: {error}")
