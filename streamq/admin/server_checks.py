"""Checks of a server: its version, settings, replicas, slots and clock, and our rights."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec

from streamq.admin import acl
from streamq.admin.probe import Probe
from streamq.driver.server_versions import (
    first_version_without_faults,
    known_faults,
    version_of_server,
)
from streamq.errors import ServerError
from streamq.protocol import lua

Verdict = Literal["ok", "warn", "fail"]
OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"
#: A server's clock that is off by more than 1 s is a warning, by more than 30 s a failure.
SKEW_S, BAD_SKEW_S = 1.0, 30.0
SLOTS = 16_384
#: How many missing rights are named, and on how many queues rights are tried.
_SHOWN = 8
MOST_QUEUES = 5


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a check."""

    check: str
    verdict: Verdict
    says: str
    #: What to do about it.
    remedy: str = ""
    #: The doctor has mended it just now.
    is_mended: bool = False


class Examiner:
    """Base of the checks: reports findings, and mends what can be mended if asked to."""

    def __init__(self, probe: Probe, *, is_mending: bool) -> None:
        self._probe = probe
        self._is_mending = is_mending

    def mend(
        self,
        check: str,
        says: str,
        remedy: str,
        mend: Callable[[], object],
        verdict: Verdict = FAIL,
    ) -> Finding:
        """Return a finding about what is wrong. Mend it first, if that was asked for."""
        if self._is_mending:
            try:
                mend()
            except ServerError as error:
                says = f"{says}; it cannot be mended: {error}"
            else:
                return Finding(check=check, verdict=OK, says=f"{says}: mended", is_mended=True)
        return Finding(check=check, verdict=verdict, says=says, remedy=remedy)


class ServerChecks(Examiner):
    """Examines a server, or each primary of a cluster."""

    def __init__(self, probe: Probe, queues: Sequence[str], *, is_mending: bool) -> None:
        """``queues``: the user should have rights on at least one of them."""
        super().__init__(probe, is_mending=is_mending)
        self._queues = queues or ["default"]
        self._asked: dict[tuple[Any, acl.AclTrial], bool] = {}

    def all(self) -> Iterator[tuple[str, Callable[[], Iterator[Finding]]]]:
        """Yield every check, with its name."""
        yield "version", self._versions
        yield "eviction", self._eviction
        yield "persistence", self._persistence
        yield "replicas", self._replicas
        yield "slots", self._slots
        yield "clock", self._clocks
        yield "rights", self._rights
        yield "scripts", self._scripts

    def _versions(self) -> Iterator[Finding]:
        for node in self._probe.primaries():
            version = version_of_server(self._probe.info(node, "server"))
            name = f"{self._probe.name(node)}: {version}"
            if version.is_too_old:
                remedy = "use Redis 7 or newer, or Valkey"
                yield Finding(
                    check="version", verdict=FAIL, says=f"{name} is too old", remedy=remedy
                )
                continue
            bad = known_faults(version.kind, version.numbers)
            if bad:
                says = f"{name} {' and '.join(bad)}"
                better = ".".join(
                    map(str, first_version_without_faults(version.kind, version.numbers))
                )
                remedy = f"upgrade it to {better} or newer"
                yield Finding(check="version", verdict=WARN, says=says, remedy=remedy)
            else:
                yield Finding(check="version", verdict=OK, says=name)

    def _eviction(self) -> Iterator[Finding]:
        for node in self._probe.primaries():
            info, name = self._probe.info(node, "memory"), self._probe.name(node)
            policy = info.get("maxmemory_policy", "noeviction")
            if policy != "noeviction":
                is_mild = policy.startswith("volatile-")
                drops = "what workers say of themselves" if is_mild else "keys"
                yield self.mend(
                    "eviction",
                    f"{name} may drop {drops}: maxmemory-policy is {policy}",
                    "CONFIG SET maxmemory-policy noeviction, and so in its configuration file",
                    lambda node=node: self._probe.ask(  # type: ignore[misc]
                        node, "CONFIG", "SET", "maxmemory-policy", "noeviction"
                    ),
                    verdict=WARN if is_mild else FAIL,
                )
                continue
            used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
            if most and used > 0.85 * most:
                says = f"{name} uses {used / most:.0%} of its memory: at 100 % loaders are refused"
                remedy = (
                    "let workers drain it, collect results, load with --window, or raise maxmemory"
                )
                yield Finding(check="memory", verdict=WARN, says=says, remedy=remedy)
            else:
                yield Finding(check="eviction", verdict=OK, says=f"{name} drops no keys")

    def _persistence(self) -> Iterator[Finding]:
        for node in self._probe.primaries():
            info, name = self._probe.info(node, "persistence"), self._probe.name(node)
            if not int(info.get("aof_enabled", 0)):
                says = f"{name} keeps no append-only file: a restart loses what it was given"
                remedy = "CONFIG SET appendonly yes, and the same in its configuration file"
                yield Finding(check="persistence", verdict=WARN, says=says, remedy=remedy)
            elif info.get("aof_last_write_status", "ok") != "ok":
                says = f"{name} cannot write its append-only file"
                yield Finding(check="persistence", verdict=FAIL, says=says, remedy="free its disk")
            else:
                yield Finding(
                    check="persistence", verdict=OK, says=f"{name} keeps an append-only file"
                )

    def _replicas(self) -> Iterator[Finding]:
        nodes = self._probe.primaries()
        for node in nodes:
            info, name = self._probe.info(node, "replication"), self._probe.name(node)
            count = int(info.get("connected_slaves", 0))
            if info.get("role") != "master":
                remedy = "name the primary, or a sentinel: redis+sentinel://"
                yield Finding(
                    check="replicas", verdict=FAIL, says=f"{name} is a replica", remedy=remedy
                )
            elif node is not None and not count:
                says = f"{name} has no replica: when it fails, its slots are gone"
                remedy = "add one: CLUSTER REPLICATE"
                yield Finding(check="replicas", verdict=WARN, says=says, remedy=remedy)
            else:
                yield Finding(check="replicas", verdict=OK, says=f"{name} has {count}")

    def _slots(self) -> Iterator[Finding]:
        if self._probe.primaries() == [None]:
            return
        missing, upto = [], 0
        for first, last in [*self._probe.slots(), (SLOTS, SLOTS)]:
            if first > upto:
                missing.append(f"{upto}-{first - 1}" if first - 1 > upto else f"{upto}")
            upto = last + 1
        if missing:
            says = f"nobody serves the slots {', '.join(missing)}: requests there stand still"
            remedy = "bring their node back, or give them to another: CLUSTER ADDSLOTS"
            yield Finding(check="slots", verdict=FAIL, says=says, remedy=remedy)
        else:
            yield Finding(check="slots", verdict=OK, says="every slot is served")

    def _clocks(self) -> Iterator[Finding]:
        for node in self._probe.primaries():
            clock, name = self._probe.clock(node), self._probe.name(node)
            trip = f"answers in {clock.trip_s * 1e3:.1f} ms"
            off = abs(clock.ahead_s)
            if off <= SKEW_S + clock.trip_s:
                yield Finding(check="clock", verdict=OK, says=f"{name} {trip}, its clock is ours")
                continue
            way = "ahead of" if clock.ahead_s > 0 else "behind"
            yield Finding(
                check="clock",
                verdict=FAIL if off > BAD_SKEW_S else WARN,
                says=f"{name}: its clock is {off:.1f} s {way} ours",
                remedy="let NTP keep both; nodes of a cluster that differ end leases early or late",
            )

    def _rights(self) -> Iterator[Finding]:
        user = self._whoami()
        # A user named after a role should have that role; any other user at least one role.
        own, team = acl.role_of_acl_user(user)
        roles = [own] if own else list(acl.ROLES)
        for node in self._probe.primaries():
            missing = {name: self._lacks(node, user, name, team) for name in roles}
            able = _checked_roles_in_no_other(name for name, lacks in missing.items() if not lacks)
            where = f"{self._probe.name(node)}: user {user}"
            if able:
                says = f"{where} may be {', '.join(able)}"
                yield Finding(check="rights", verdict=OK, says=says)
                continue
            nearest = min(missing, key=lambda name: len(missing[name]))
            few, more = missing[nearest][:_SHOWN], len(missing[nearest]) - _SHOWN
            lacks = ", ".join(few) + (f" and {more} more" if more > 0 else "")
            yield Finding(
                check="rights",
                verdict=FAIL,
                says=f"{where} can be nobody; as {nearest} it may not {lacks}",
                remedy="write the ACL file of this version (streamq acl FOLDER --keep) and "
                "ACL LOAD it on every node",
            )

    def _lacks(self, node: Any, user: str, role: str, team: str) -> list[str]:
        """Return what a role does and the user may not do, on the queue where that is least."""
        lacks = []
        for queue in self._queues:
            trials = list(acl.acl_trials_of_role(role, self._probe.prefix, queue, team))
            may = self._may(node, user, trials)
            lacks.append(
                [trial.what for trial, is_so in zip(trials, may, strict=True) if not is_so]
            )
        return min(lacks, key=len)

    def _may(self, node: Any, user: str, trials: list[acl.AclTrial]) -> list[bool]:
        new = [each for each in trials if (node, each) not in self._asked]
        told = self._probe.may(node, user, [(each.words, each.filling) for each in new])
        self._asked.update(zip([(node, each) for each in new], told, strict=True))
        return [self._asked[node, each] for each in trials]

    def _whoami(self) -> str:
        try:
            name = self._probe.ask(self._probe.primaries()[0], "ACL", "WHOAMI")
        except ServerError:
            return "unknown"
        return name.decode() if isinstance(name, bytes) else str(name)

    def _scripts(self) -> Iterator[Finding]:
        known = len(lua.script_names())
        scripts = self._probe.scripts
        for node in self._probe.primaries():
            missing = scripts.missing(node)
            has = f"{self._probe.name(node)} has {known - len(missing)} of {known}"
            if missing and self._is_mending:
                yield self.mend(
                    "scripts",
                    has,
                    "ask as a user that may load them: admin of streamq acl",
                    partial(scripts.load, node, missing),
                    verdict=WARN,
                )
                continue
            says = f"{has}; a user who may load scripts, or a janitor, loads others when needed"
            yield Finding(check="scripts", verdict=OK, says=says)


def _checked_roles_in_no_other(names: Iterable[str]) -> list[str]:
    """Return those of the roles that no other one of them includes."""
    scripts_of = {name: set(acl.ROLES[name].scripts) for name in names}
    return [
        name
        for name, own in scripts_of.items()
        if not any(own < each for each in scripts_of.values())
    ]
