"""ShardGroup: the actors of all shards. A call goes to one replica, and to another if that one is lost or slow."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.nodes import actor_on, alive_nodes
from memhier.ann.cluster.ray_extra import GONE, RayActorError, RayTaskError, ray
from memhier.ann.cluster.shard import NotOpenError, Shard
from memhier.ann.cluster.shard_copy import ShardCopy
from memhier.errors import LockedError, MemhierError, ShardLostError

__all__ = ["MISSING", "Call", "ShardGroup", "errors_of"]

_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 0.5  # of a process that is there
_PIECE_BYTES = 8 << 20
_THREADS = 4  # calls of one actor at a time

MISSING = object()
"""The result of a call of a shard of which no replica answers."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one shard: a method of `Shard`, and its arguments."""

    shard: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(slots=True)
class _Asked:
    """A call on its way."""

    number: int
    call: Call
    replica: int
    since: float
    tried: set[int] = field(default_factory=set)


class ShardGroup:
    """Actors of all replicas of all shards, each on its node.

    Parameters
    ----------
    path
        The folder of the shards on each node.
    places
        The node of each replica of each shard, ``[shards][replicas]``; None where it is missing.
    epoch
        The last commit over all shards.
    writable
        Whether shards may be changed.
    patience
        Seconds to wait for the answer of a replica, and for a lost one to come back.

    Attributes
    ----------
    epoch
        The last commit.
    changed
        Whether there were changes since: a replica that is lost then lacks them.
    stale
        Replicas, as pairs of shard and replica, that lack commits or changes. They are not asked.
    """

    def __init__(
        self, path: str, places: Sequence[Sequence[str | None]], epoch: int, writable: bool, patience: float
    ) -> None:
        self.epoch: int = epoch
        self.changed: bool = False
        self._path, self._writable, self._patience = path, writable, patience
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._places = [list(of_shard) for of_shard in places]
        self._actors: list[list[Any]] = [[None] * len(of_shard) for of_shard in places]
        self.stale: set[tuple[int, int]] = set()
        try:
            started = []
            for shard, of_shard in enumerate(places):
                for replica, node in enumerate(of_shard):
                    if node is None:
                        self.stale.add((shard, replica))
                        continue
                    self._actors[shard][replica] = actor = self._start(shard, replica, node)
                    started.append((shard, replica, actor.open.remote(epoch, writable)))
            for shard, replica, answer in started:
                try:
                    self._take_in(shard, replica, self._awaited(answer, shard, replica))
                except (*GONE, MemhierError, OSError):
                    self._open(shard, replica)
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self._actors)

    def replicas(self, shard: int) -> list[int]:
        """Return the replicas of a shard that have all commits and changes."""
        every = range(len(self._actors[shard]))
        return [replica for replica in every if (shard, replica) not in self.stale]

    def ask(self, calls: Sequence[Call], *, patient: bool = False) -> list[Any]:
        """Return the results of calls that change nothing, each from one replica; MISSING where none answers.

        A replica that is slow is left for another one, unless the calls are `patient`.

        Raises
        ------
        Exception
            An error that a call raised in its shard.
        """
        results: list[Any] = [MISSING] * len(calls)
        waiting: dict[Any, _Asked] = {}
        turn = next(self._turns)
        for number, call in enumerate(calls):
            if replicas := self.replicas(call.shard) or self._returned(call.shard):
                self._send(waiting, _Asked(number, call, replicas[turn % len(replicas)], time.monotonic()))
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=None if patient else self._patience)
            for answer in ready:
                asked = waiting.pop(answer)
                try:
                    results[asked.number] = ray.get(answer)
                except RayTaskError as error:
                    if not isinstance(error.cause, NotOpenError):
                        raise error.cause from None
                    self._again(waiting, asked, reopen=True)
                except GONE:
                    self._again(waiting, asked)
            if not ready:  # slow: another replica may be faster
                alive = alive_nodes()
                for answer, asked in [*waiting.items()]:
                    del waiting[answer]
                    if self._places[asked.call.shard][asked.replica] not in alive:
                        self.stale.add((asked.call.shard, asked.replica))
                    self._again(waiting, asked)
        return results

    def tell(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Make calls at every replica of their shards, and return the answers of each, exceptions included.

        A replica that was lost, or started anew, is stale from then on.
        """
        sent = [[(replica, self._submit(call, replica)) for replica in self.replicas(call.shard)] for call in calls]
        results: list[list[Any]] = []
        for call, answers in zip(calls, sent, strict=True):
            found = []
            for replica, answer in answers:
                try:
                    found.append(self._awaited(answer, call.shard, replica, raw=True))
                except RayTaskError as error:
                    if isinstance(error.cause, NotOpenError):
                        self.stale.add((call.shard, replica))
                    else:
                        found.append(error.cause)
                except GONE:
                    self.stale.add((call.shard, replica))
            results.append(found)
        return results

    def insist(self, call: Call) -> list[Any]:
        """Return the answers of all replicas of a shard, stale ones as well; wait while one comes back.

        Raises
        ------
        ShardLostError
            When one does not answer while patience lasts.
        """
        began, found = time.monotonic(), []
        for replica, actor in enumerate(self._actors[call.shard]):
            while True:
                try:
                    if actor is None:
                        raise ShardLostError(f"replica {replica} of shard {call.shard} is lost")
                    found.append(self._awaited(self._submit(call, replica), call.shard, replica))
                    break
                except GONE:
                    if time.monotonic() - began > self._patience:
                        raise ShardLostError(f"replica {replica} of shard {call.shard} does not answer") from None
                    time.sleep(_PAUSE_SECONDS)
        return found

    def reopen(self) -> None:
        """Bring every replica back to the last commit."""
        self.changed = False
        for shard, actors in enumerate(self._actors):
            for replica, actor in enumerate(actors):
                if actor is not None:
                    self._open(shard, replica, anew=True)

    def heal(self, about: ClusterMap, restore: Callable[[ClusterMap, str], None] | None) -> None:
        """Bring stale replicas to the last commit: opened again where they have it, or copied from a good one.

        A replica whose node is gone gets another one, if possible without replicas of the shard. Without a good
        replica, `restore` makes one on a node.
        """
        for shard, replica in sorted(self.stale):
            self._heal(about.of(shard, replica), restore)
            while self._places[shard][replica] not in alive_nodes():  # the node was lost meanwhile
                self._heal(about.of(shard, replica), restore)

    def _heal(self, about: ClusterMap, restore: Callable[[ClusterMap, str], None] | None) -> None:
        shard, replica, nodes = about.shard, about.replica, alive_nodes()
        known = self._places[shard][replica]
        apart = [each for each in nodes if each not in self._places[shard]] or nodes
        node = apart[(shard + replica) % len(apart)] if known is None or known not in nodes else known
        self._places[shard][replica] = node
        if (actor := self._actors[shard][replica]) is not None:
            if node == known:
                self._open(shard, replica)
            if (shard, replica) not in self.stale:
                return
            ray.kill(actor)
        if not self._copied(about, node) and restore is not None:
            restore(about, node)
        self._actors[shard][replica] = self._start(shard, replica, node)
        self._open(shard, replica)

    def _copied(self, about: ClusterMap, node: str) -> bool:
        """Copy a good replica to a node, from another one where it dies meanwhile; return whether there was one."""
        began = time.monotonic()
        while (good := self.replicas(about.shard)) and time.monotonic() - began <= 2 * self._patience:
            try:
                self._copy(about, self._actors[about.shard][good[0]], node)
                return True
            except (*GONE, RayTaskError) as error:
                if isinstance(error, RayTaskError) and not isinstance(error.cause, (NotOpenError, *GONE)):
                    raise
                if node not in alive_nodes():
                    return False
                self._open(about.shard, good[0])
        return False

    def _copy(self, about: ClusterMap, source: Any, node: str) -> None:
        """Copy a good replica to a node."""
        target = actor_on(node, ShardCopy, self._path, about.shard, about.replica)
        try:
            ray.get(target.begin.remote())
            for name, size in ray.get(source.lay_out.remote()):
                for offset in range(0, max(size, 1), _PIECE_BYTES):
                    ray.get(target.write.remote(name, source.read.remote(name, offset, _PIECE_BYTES)))
            ray.get(target.finish.remote(about))
        finally:
            source.put_away.remote()
            ray.kill(target)

    def kill(self, shard: int, replica: int) -> None:
        """End the process of a replica, as a fault would, and return once it answers no more; Ray starts it anew."""
        actor = self._actors[shard][replica]
        before = self._process(actor)
        ray.kill(actor, no_restart=False)
        while before is not None and self._process(actor) == before:
            time.sleep(_PAUSE_SECONDS)

    def _process(self, actor: Any) -> int | None:
        """Return the process of a replica; None if it does not answer at once."""
        answer = actor.process.remote()
        try:
            return int(ray.get(answer)) if ray.wait([answer], timeout=_ANSWER_SECONDS)[0] else None
        except GONE:
            return None

    def close(self) -> None:
        """Close all shards and end their actors."""
        for actors in self._actors:
            for actor in actors:
                if actor is not None:
                    ray.kill(actor)
        self._closed = True
        self.stale.update(
            (shard, replica) for shard, of_shard in enumerate(self._places) for replica in range(len(of_shard))
        )

    def beside(self, path: str, places: Sequence[Sequence[str | None]], epoch: int) -> "ShardGroup":
        """Return a group of other shards, open as these are."""
        return ShardGroup(path, places, epoch, self._writable, self._patience)

    def _start(self, shard: int, replica: int, node: str) -> Any:
        return actor_on(node, Shard, self._path, shard, replica, threads=_THREADS, max_restarts=-1)

    def _returned(self, shard: int) -> list[int]:
        """Return the replicas of a shard that has none, after those were opened that came back with all commits."""
        for replica, actor in enumerate(self._actors[shard]):
            if actor is not None and not self.changed:
                self._open(shard, replica)
        return self.replicas(shard)

    def _open(self, shard: int, replica: int, *, anew: bool = False) -> None:
        """Open a replica, and wait while its actor starts or another process lets it go; it is stale if that fails."""
        actor, began = self._actors[shard][replica], time.monotonic()
        with self._lock:
            while not self._closed:
                try:
                    if anew:
                        self._awaited(actor.close.remote(), shard, replica)
                    opened = actor.open.remote(self.epoch, self._writable)
                    self._take_in(shard, replica, self._awaited(opened, shard, replica))
                    return
                except (*GONE, LockedError) as error:
                    if time.monotonic() - began > self._patience:
                        self.stale.add((shard, replica))
                        if isinstance(error, LockedError):
                            raise
                        return
                except (MemhierError, OSError):  # the folder is lost, or damaged
                    self.stale.add((shard, replica))
                    return
                time.sleep(_PAUSE_SECONDS)

    def _take_in(self, shard: int, replica: int, mark: int) -> None:
        """Take a replica in that was opened at a commit; it is stale if it lacks others."""
        if self.changed or mark != self.epoch:
            self.stale.add((shard, replica))
        else:
            self.stale.discard((shard, replica))

    def _send(self, waiting: dict[Any, _Asked], asked: _Asked) -> None:
        waiting[self._submit(asked.call, asked.replica)] = asked

    def _awaited(self, answer: Any, shard: int, replica: int, *, raw: bool = False) -> Any:
        """Return the result of a call, or raise its error; RayActorError where the node of the replica is gone.

        Ray itself would wait for that node. With `raw` an error in the shard stays a RayTaskError.
        """
        while not ray.wait([answer], timeout=self._patience)[0]:
            if self._places[shard][replica] not in alive_nodes():
                raise RayActorError
        try:
            return ray.get(answer)
        except RayTaskError as error:
            if raw:
                raise
            raise error.cause from None

    def _submit(self, call: Call, replica: int) -> Any:
        return getattr(self._actors[call.shard][replica], call.method).remote(*call.arguments)

    def _again(self, waiting: dict[Any, _Asked], asked: _Asked, *, reopen: bool = False) -> None:
        """Send a call once more: to a replica not tried, or to the first one that came back, while patience lasts."""
        shard, replica = asked.call.shard, asked.replica
        if reopen:
            self._open(shard, replica)
        else:
            asked.tried.add(replica)
        replicas = self.replicas(shard)
        others = [each for each in replicas if each not in asked.tried]
        if not replicas or (not others and time.monotonic() - asked.since > self._patience):
            return
        if not others:
            time.sleep(_PAUSE_SECONDS)
            asked.tried.clear()
        asked.replica = (others or replicas)[0]
        self._send(waiting, asked)


def errors_of(answers: list[list[Any]]) -> list[BaseException]:
    """Return the exceptions among the answers of :meth:`ShardGroup.tell`."""
    return [each for of_shard in answers for each in of_shard if isinstance(each, BaseException)]
