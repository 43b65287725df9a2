"""Checks of the shards: reachable, of one version and one placement, and how busy they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

from embershard.doctor.case import Case
from embershard.doctor.check import Finding, check, fail, ok, size, some, warn
from embershard.doctor.probe import Probe
from embershard.proto.errors import ShardUnavailable, WrongShards
from embershard.proto.timing import Deadline
from embershard.proto.transport.addresses import transport_for
from embershard.proto.user_modules import version_of
from embershard.ps.coordination.fencing import AHEAD_MINUTES
from embershard.worker.client.shard_connection import handshake

_SLOW_CALL_SECONDS = 0.002
_APART_SECONDS = 10.0  # machines with NTP are within 0.1
_MANY_BYTES = 2**16  # a rendezvous of workers, which a shard parks too, has some hundred
_GREET_TIMEOUT = timedelta(seconds=2)


@check(
    "addresses",
    asks="whether the addresses are well-formed, and each is named once",
    remedy="write host:port,host:port with a port of 1..65535, or unix:/path, or file:DIR; docs/transports.md",
)
def addresses(case: Case) -> Finding | None:
    """Check that shard_addresses accepts the addresses."""
    if case.address_mistake:
        return fail(case.address_mistake)
    return ok(f"{len(case.probes)} named") if case.probes else None


@check(
    "names",
    asks="whether the shards' host names can be resolved here",
    remedy="check the spelling, DNS and /etc/hosts, or write the IP address",
)
def names(case: Case) -> Finding | None:
    """Check that the name of every host resolves."""
    return _each(case.probes, lambda probe: probe.resolve_problem, "resolved")


@check(
    "ports",
    asks="whether each shard's port accepts a connection",
    remedy="start the shard (embershard ps --listen, or up); from another machine it listens there only with "
    "--insecure; open the port in the firewall",
)
def ports(case: Case) -> Finding | None:
    """A connection, without a word."""
    found = [probe for probe in case.probes if not probe.resolve_problem]
    return _each(found, lambda probe: probe.port_problem, "reachable")


@check(
    "stream",
    asks="whether an embershard shard answers there on the stream transport, the default",
    remedy="name the shards' ports, not those of another program; if a shard is stopped or hangs, see its output",
)
def stream(case: Case) -> Finding | None:
    """A Hello over the stream transport."""
    return _answers(case.probes, lambda probe: probe.stream_problem)


@check(
    "gRPC",
    asks="whether the shard answers there on gRPC too: health checks and clients in other languages",
    remedy="see the shard's output; a proxy in between must support HTTP/2",
)
def grpc(case: Case) -> Finding | None:
    """Check that every shard answers over gRPC; what answers on neither transport is named by `stream`."""
    answering = [probe for probe in case.probes if probe.greeting or not probe.stream_problem or probe.is_rpc]
    return _answers(answering, lambda probe: probe.grpc_problem)


@check(
    "recovery",
    asks="whether a shard still recovers its rows from its event log: it answers nothing else until it has them",
    remedy="wait: it continues by itself, and so do the workers; `embershard status` shows how far it is",
)
def recovery(case: Case) -> Finding | None:
    """Check that no shard answers that it recovers."""
    recovering = [(probe, probe.recovering) for probe in case.probes if probe.recovering is not None]
    texts = [f"{probe.address}: {error.progress}" for probe, error in recovering]
    if any(error.fields.get("waits_for_room") for _, error in recovering):
        return fail(some(texts), "free disk space where the log is (--log-dir), or raise the quota; it goes on then")
    if texts:
        return warn(some(texts))
    return ok("no shard recovers") if any(probe.greeting for probe in case.probes) else None


@check(
    "access",
    asks="whether each shard has access control, so that not everybody who can connect can read and change the model",
    remedy="start it with --access access.yaml, and on loopback without --insecure-loopback; docs/security.md",
)
def access(case: Case) -> Finding | None:
    """Check what the shard's hello says of tokens."""
    known = [probe for probe in case.probes if probe.asks is not None]
    if not known:
        return None
    asks_nobody = [probe.name for probe in known if not probe.asks]
    return warn(f"asks nobody who they are: {some(asks_nobody)}") if asks_nobody else ok("they ask who comes")


@check(
    "system times",
    asks="whether the shards' machines have the same time as this one: worker epochs and run numbers are times, and "
    "certificates have a period of validity",
    remedy="set the system time of the named machines by NTP (timedatectl set-ntp true)",
)
def system_times(case: Case) -> Finding | None:
    """Compare the shards' clocks with this machine's."""
    ahead = [(probe.name, seconds) for probe in case.probes if (seconds := probe.ahead_seconds) is not None]
    if not ahead:
        return None
    apart = [
        f"{name} is {abs(seconds):,.0f} s {'ahead' if seconds > 0 else 'behind'}"
        for name, seconds in ahead
        if abs(seconds) > _APART_SECONDS
    ]
    if min(seconds for _, seconds in ahead) < -60 * AHEAD_MINUTES:
        return fail(
            f"{some(apart)}: a shard that is {AHEAD_MINUTES} minutes behind refuses the workers of this machine"
        )
    return warn(some(apart)) if apart else ok("as here")


@check(
    "latency",
    asks="how long a small call takes: without prefetch, a step waits for at least one",
    remedy="put workers near the shards (same rack, same zone), prefetch with a staleness of 1 or more, use larger "
    "batches",
)
def latency(case: Case) -> Finding | None:
    """The median of some small calls to each shard."""
    calls = [(probe, probe.call_seconds) for probe in case.probes if probe.call_seconds is not None]
    if not calls:
        return None
    slowest, seconds = max(calls, key=lambda pair: pair[1])
    text = f"{min(call for _, call in calls) * 1e3:.2f} to {seconds * 1e3:.2f} ms, the slowest {slowest.name}"
    return warn(text) if seconds > _SLOW_CALL_SECONDS else ok(text)


@check(
    "Unix sockets",
    asks="whether shards on this machine are reached by Unix sockets, at half the cost of TCP",
    remedy="write host:port without tcp:// or grpc://, and run workers as the shards' user (or root's shards), in the "
    "same network namespace",
)
def unix_sockets(case: Case) -> Finding | None:
    """Whether a worker here would use the socket beside the port."""
    here = [probe for probe in case.probes if probe.here]
    if not here:
        answered = any(probe.greeting for probe in case.probes)
        return ok("no shard runs on this machine: TCP") if answered else None
    over_tcp = [probe.name for probe in here if not probe.beside and not probe.bare.startswith("unix:")]
    return warn(f"over TCP: {some(over_tcp)}") if over_tcp else ok(f"{len(here)} shards here, by Unix sockets")


@check(
    "versions",
    asks="whether the shards and this machine have the same version of embershard",
    remedy="install one version everywhere, and start the shards again",
)
def versions(case: Case) -> Finding | None:
    """Compare the shards' versions with this one."""
    mine = version_of()
    found = [(probe, probe.greeting.version) for probe in case.probes if probe.greeting is not None]
    if not found:
        return None
    others = [f"{probe.name} has {version}" for probe, version in found if version != mine]
    return fail(f"here {mine}; {some(others)}") if others else ok(f"{mine} everywhere")


@check(
    "placement",
    asks="whether the addresses name every shard of one placement, of one placement epoch, each once",
    remedy="name every shard of one job, each once; start all with the same --of and each with its own --shard",
)
def placement(case: Case) -> Finding | None:
    """Check that the shards agree on a placement that a worker could connect to."""
    if any(probe.greeting is None for probe in case.probes) or not case.probes:
        return None  # a check before has named those that did not answer
    transports = [transport_for(probe.address, tls=case.tls) for probe in case.probes]
    try:
        links = handshake(transports, 0, Deadline(_GREET_TIMEOUT))
    except (WrongShards, ShardUnavailable) as error:
        return fail(str(error))
    finally:
        for transport in transports:
            transport.close()
    return ok(f"all of {len(links)} shards, epoch {links[0].greeting.placement_epoch}")


@check(
    "instances",
    asks="whether every address leads to a different process, and to the same one over every transport",
    remedy="name each shard by one address; let only one process listen on a port",
)
def instances(case: Case) -> Finding | None:
    """The random names that shards take when they start."""
    apart = [probe.name for probe in case.probes if probe.is_two]
    if apart:
        return fail(f"two processes answer, one on stream and one on gRPC: {some(apart)}")
    found = Counter(probe.greeting.instance for probe in case.probes if probe.greeting is not None)
    if not found:
        return None
    twice = [probe.address for probe in case.probes if probe.greeting and found[probe.greeting.instance] > 1]
    return fail(f"one shard under several addresses: {some(twice)}") if twice else ok(f"{len(found)} processes")


@check(
    "tables",
    asks="whether every shard has the same tables, and all tables have their first values",
    remedy="if the worker that loads a table died, start shards and workers again",
)
def tables(case: Case) -> Finding | None:
    """Names, dims and optimizers over all shards."""
    if not case.statuses:
        return None
    declared = [{(table.name, table.dim, table.optimizer) for table in status.tables} for _, status in case.statuses]
    everywhere, anywhere = set.intersection(*declared), set.union(*declared)
    odd = sorted({name for name, _, _ in anywhere - everywhere})
    if odd:
        return fail(f"not the same on all shards: {some(odd)}")
    loading = sorted({table.name for _, status in case.statuses for table in status.tables if table.loading})
    if loading:
        return warn(f"still being loaded: {some(loading)}")
    rows = sum(table.rows for _, status in case.statuses for table in status.tables)
    held = sum(table.bytes for _, status in case.statuses for table in status.tables)
    return ok(f"{len(anywhere)} tables, {rows:,} rows, {size(held)}")


@check(
    "load",
    asks="whether requests queue at a shard, which has one thread for its tables",
    remedy="start more shards, each on its own core; a shard that is much busier than the others has a hot table",
)
def load(case: Case) -> Finding | None:
    """Bytes that wait at both looks; those that wait for other workers are no load."""
    if not case.statuses:
        return None
    busy = [
        f"{probe.name} has {size(status.queued_bytes)} waiting" for probe, status in case.statuses if is_busy(probe)
    ]
    return warn(some(busy)) if busy else ok("no requests wait for it")


@check(
    "gradients",
    asks="whether gradients with NaN or Inf arrived: shards skip their rows",
    remedy="lower the learning rate, warm it up or clip gradients; look for unbounded values in the data",
)
def gradients(case: Case) -> Finding | None:
    """Rows that were left out since the shards started."""
    if not case.statuses:
        return None
    skipped = sum(status.skipped_rows for _, status in case.statuses)
    pushed = sum(status.pushed_rows for _, status in case.statuses)
    if not skipped:
        return ok(f"all finite, {pushed:,} rows pushed")
    return warn(f"{skipped:,} gradient rows held NaN or Inf, beside {pushed:,} that were applied")


def is_busy(probe: Probe) -> bool:
    """Whether requests wait for the shard itself: more of them than what its workers' clock may hold back."""
    looks = [look for look in (probe.before, probe.status) if look is not None]
    held_back = any(look.members and look.staleness >= 0 for look in looks)
    return not held_back and bool(looks) and min(look.queued_bytes for look in looks) > _MANY_BYTES


CHECKS = (
    addresses,
    names,
    ports,
    stream,
    grpc,
    recovery,
    access,
    system_times,
    latency,
    unix_sockets,
    versions,
    placement,
    instances,
    tables,
    load,
    gradients,
)


def _answers(probes: Sequence[Probe], problem: Callable[[Probe], str]) -> Finding | None:
    """Whether every port that takes connections answers on a transport."""
    asked = [probe for probe in probes if not probe.port_problem and not probe.is_rpc]
    if not asked and any(probe.is_rpc for probe in probes):
        return ok("rpc:// is not asked: it executes pickles; name the shards' --listen")
    return _each(asked, problem, "answered")


def _each(probes: Sequence[Probe], problem: Callable[[Probe], str], good: str) -> Finding | None:
    """Whether a step of the probe went well at each address that came so far."""
    problems = [f"{probe.address}: {text}" for probe in probes if (text := problem(probe))]
    if problems:
        return fail(some(problems))
    return ok(f"{len(probes)} {good}") if probes else None
