"""What TLS costs, and what rotating certificates costs, on this machine.

- cpu: one worker pulls and pushes over TCP, with TLS and without, in turn: seconds of CPU per GB that TLS adds, of the
  worker and of the shards.
- dlrm: two workers train a DLRM on two shards over TCP, all on these cores: the rate with TLS over the rate without.
- link: a link of 1 Gbit/s between two network namespaces: the busier direction's rate with TLS over that without.
- unix: shards with certificates, reached by their Unix sockets: work per second of CPU, over that of shards without.
- rotation: 100 times, the certificates of all are replaced while workers pull and push over both transports, and
  connections live for 0.3 s: no step may fail, and shards must use each new certificate.

Prints one JSON line; exits 1 below a bar, 2 where the link cannot be made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
from cryptography import x509

from embershard.benchmark.measure import BenchResult, measure_pull_push, measure_train
from embershard.benchmark.settings import PullPush, Train, TransportName
from embershard.compare.run.netns import SHARD_IP, Namespaces, NoNamespaces
from embershard.deploy.authority import Authority
from embershard.proto.security.tls import TLS
from link import LINKS
from link import measure as measure_link
from timing import finish, interval, load, machine, print_table

ADDED_CPU, DLRM_SHARE, LINK_SHARE, UNIX_SHARE, ROTATIONS = 1.0, 0.78, 0.97, 0.99, 100
COVERED = ("127.0.0.1", "localhost", SHARD_IP)
QUICK = {"poll_interval": timedelta(milliseconds=50), "connection_lifetime": timedelta(milliseconds=300)}


def issue(authority: Authority, folder: Path) -> int:
    """Replace a folder's files at once, as Kubernetes does: by a link to another folder. The new serial number."""
    new = folder / f"..{time.time_ns()}"
    new.mkdir(parents=True)
    files = authority.issue("bench", COVERED, timedelta(days=30))
    for name, data in files.items():
        (new / name).write_bytes(data)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..next").symlink_to(new.name)
    (folder / "..next").rename(folder / "..data")
    return x509.load_pem_x509_certificate(files["tls.crt"]).serial_number


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look until it is so; SystemExit where that takes a minute."""
    end = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit("new certificates, or steps with them, did not come within a minute")
        time.sleep(0.02)


Sides = dict[str, list[BenchResult]]  # "plain", "tls" -> a result per round


def in_turn(measure: Callable[[str], BenchResult], rounds: int, folder: str) -> Sides:
    """Both sides, in turn: what else the machine does meets both."""
    found: Sides = {"plain": [], "tls": []}
    for number in range(rounds):
        for side in ("plain", "tls") if number % 2 else ("tls", "plain"):
            found[side].append(measure(folder if side == "tls" else ""))
    return found


def cpu_per_gb(result: BenchResult) -> tuple[float, float]:
    """Seconds of CPU per GB moved: of the worker, and of all shards."""
    gigabytes = result.mb_per_second / result.steps_per_second / 1000
    assert result.shard_cpu_ms is not None
    return result.worker_cpu_ms / 1000 / gigabytes, result.shard_cpu_ms / 1000 / gigabytes


def bar_cpu(folder: str, args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    def measure(tls: str) -> BenchResult:
        return measure_pull_push(PullPush(transport=TransportName.TCP, tls=tls, steps=args.steps, rounds=1))

    found = in_turn(measure, args.rounds, folder)
    middle = {side: np.median([cpu_per_gb(one) for one in results], axis=0) for side, results in found.items()}
    worker, shards = (float(added) for added in middle["tls"] - middle["plain"])
    rows = [[side, *map(float, values)] for side, values in middle.items()]
    print_table(["CPU seconds per GB", "worker", "shards"], [*rows, ["added", worker, shards]])
    failures = [
        f"TLS adds {added:.2f} s of CPU per GB to the {side}, the bar is {ADDED_CPU}"
        for side, added in (("worker", worker), ("shards", shards))
        if added > ADDED_CPU
    ]
    return {"worker_s_per_gb": round(worker, 3), "shards_s_per_gb": round(shards, 3)}, failures


def bar_dlrm(folder: str, args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    def measure(tls: str) -> BenchResult:
        return measure_train(
            Train(
                transport=TransportName.TCP, tls=tls, shards=2, workers=2, dim=64, batch=2048, steps=args.steps,
                rounds=1, beside_torch=False,
            )
        )  # fmt: skip

    found = in_turn(measure, args.rounds, folder)
    pairs = zip(found["tls"], found["plain"], strict=True)
    share = statistics.median(tls.samples_per_second / plain.samples_per_second for tls, plain in pairs)
    step_mb = found["plain"][0].mb_per_second / found["plain"][0].steps_per_second
    rates = [statistics.median(one.samples_per_second for one in found[side]) for side in ("plain", "tls")]
    cpu = {side: statistics.median(sum(cpu_per_gb(one)) for one in results) for side, results in found.items()}
    by_cpu = cpu["plain"] / cpu["tls"]  # what the share would be on a machine that does nothing else
    print_table(
        ["DLRM over TCP, 2 x 2", "plain", "TLS", "share", "by CPU", "MB a step"],
        [["samples/s", *rates, share, by_cpu, step_mb]],
    )
    failures = [] if share >= DLRM_SHARE else [f"DLRM runs at {share:.2f} of plain, the bar is {DLRM_SHARE}"]
    return {"share": round(share, 3), "share_by_cpu": round(by_cpu, 3), "step_mb": round(step_mb, 1)}, failures


def bar_link(folder: str, args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    shares: dict[str, list[float]] = {"plain": [], "tls": []}
    with Namespaces() as made:
        made.shape(LINKS["1gbit"])
        for number in range(args.rounds):
            for side in ("plain", "tls") if number % 2 else ("tls", "plain"):
                with environment(EMBERSHARD_TLS=folder if side == "tls" else ""):
                    got = measure_link(made, "client", "1gbit", args.seconds, folder if side == "tls" else "")
                shares[side].append(max(got["sent_bytes"], got["received_bytes"]) * 8 / LINKS["1gbit"])
    plain, tls = (statistics.median(shares[side]) for side in ("plain", "tls"))
    print_table(["1 Gbit/s", "plain", "TLS", "share"], [["of the link", plain, tls, tls / plain]])
    failures = [] if tls / plain >= LINK_SHARE else [f"a link runs at {tls / plain:.3f}, the bar is {LINK_SHARE}"]
    return {"plain": round(plain, 4), "tls": round(tls, 4), "share": round(tls / plain, 4)}, failures


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if value})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def bar_unix(folder: str, args: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    def measure(tls: str) -> BenchResult:
        return measure_pull_push(PullPush(transport=TransportName.STREAM, tls=tls, steps=args.steps, rounds=1))

    # many pairs: where a process's memory lies makes one run a third dearer than the next
    found = in_turn(measure, 8 * args.rounds, folder)
    costs = {side: [sum(cpu_per_gb(one)) for one in results] for side, results in found.items()}
    cost = {side: statistics.median(values) for side, values in costs.items()}
    shares = [plain / tls for plain, tls in zip(costs["plain"], costs["tls"], strict=True)]
    share, (low, high) = statistics.median(shares), interval(shares)
    print_table(
        ["Unix sockets, CPU s per GB", "plain", "certificates", "share", "95 %"],
        [["worker and shards", cost["plain"], cost["tls"], share, f"{low:.3f} to {high:.3f}"]],
    )
    failures = [] if share >= UNIX_SHARE else [f"Unix sockets run at {share:.3f}, the bar is {UNIX_SHARE}"]
    return {"share": round(share, 4), "low": round(low, 4), "high": round(high, 4)}, failures


def bar_rotation(authority: Authority, folder: Path, rotations: int) -> tuple[dict[str, float], list[str]]:
    """A worker pulls and pushes over short-lived connections of both transports while everything is replaced."""
    from embershard.proto.errors import EmbershardError
    from embershard.proto.routing import make_route
    from embershard.proto.spec import RowWiseAdagrad, TableSpec
    from embershard.proto.transport.client_tls import ClientTLS
    from embershard.worker.client.client import Client

    sides = {name: folder / name for name in ("shards", "worker")}
    for path in sides.values():
        issue(authority, path)
    steps = {"tcp": 0, "grpc": 0}
    errors: list[str] = []
    serials: set[int] = set()
    done = threading.Event()
    with ExitStack() as stack:
        shards = [stack.enter_context(quick_shard(index, 2, sides["shards"])) for index in range(2)]
        tls = TLS(sides["worker"], **QUICK)

        def work(number: int, scheme: str) -> None:
            client = Client.connect([f"{scheme}://{address}" for address in shards], worker=number, tls=tls)
            spec = TableSpec(name=scheme, dim=16, optimizer=RowWiseAdagrad(lr=0.01))
            client.declare(spec)
            route = make_route(np.arange(4096), spec.space_key, client.placement)
            try:
                while not done.is_set():
                    (rows,) = client.pull([(spec.name, route)], keep=True)
                    client.push([(spec.name, route, rows)], clock=steps[scheme])
                    steps[scheme] += 1
            except EmbershardError as error:
                errors.append(f"{scheme}: {error}")
            finally:
                client.close()

        threads = [threading.Thread(target=work, args=(number, scheme)) for number, scheme in enumerate(steps)]
        for thread in threads:
            thread.start()
        look = ClientTLS(tls, f"tcp://{shards[0]}")
        wait_until(lambda: bool(errors) or min(steps.values()) > 0)  # both transports have compiled, and work
        for _ in range(rotations):
            if errors:
                break
            issue(authority, sides["worker"])
            number = issue(authority, sides["shards"])
            before = sum(steps.values())
            wait_until(lambda number=number: look.certificate_of_shard().serial_number == number)
            serials.add(number)
            wait_until(lambda before=before: bool(errors) or sum(steps.values()) > before + 1)  # work goes on with it
        done.set()
        for thread in threads:
            thread.join()
    print_table(
        ["rotations", "certificates seen", "steps by stream", "by gRPC", "failed"],
        [[str(rotations), len(serials), steps["tcp"], steps["grpc"], len(errors)]],
    )
    failures = [f"a step failed: {error}" for error in errors]
    if len(serials) < rotations:
        failures.append(f"of {rotations} new certificates a shard used {len(serials)}")
    if min(steps.values()) < rotations:
        failures.append(f"there was no load: {steps}")
    return {"rotations": rotations, "failed_steps": len(errors), "steps": sum(steps.values())}, failures


@contextmanager
def quick_shard(index: int, of: int, folder: Path) -> Iterator[str]:
    """The address of a shard, as a process, that looks at its files often and ends connections soon."""
    import json

    words = [sys.executable, __file__, "--shard", f"{index}/{of}", "--folder", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.kill()


def serve_quick(place: str, folder: str) -> None:
    from embershard.ps.options import ServerOptions
    from embershard.ps.server import serve

    index, _, of = place.partition("/")
    options = ServerOptions(
        shard=int(index), of=int(of), listen="127.0.0.1:0", tls=TLS(folder, **QUICK), parent_pid=os.getppid()
    )
    sys.exit(serve(options))


BARS = ("cpu", "dlrm", "link", "unix", "rotation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(BARS), help="of " + ", ".join(BARS))
    parser.add_argument("--rounds", type=int, default=5, help="of each side, in turn")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the link, for each round")
    parser.add_argument("--rotations", type=int, default=ROTATIONS)
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shard:
        serve_quick(args.shard, args.folder)
    print(machine(), load(), sep=", ", flush=True)
    result: dict[str, object] = {}
    failures: list[str] = []
    authority = Authority.create("bench")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "both"
        issue(authority, folder)
        bars = {"cpu": bar_cpu, "dlrm": bar_dlrm, "link": bar_link, "unix": bar_unix}
        for name in args.only.split(","):
            if name == "rotation":
                result[name], found = bar_rotation(authority, Path(place), args.rotations)
            else:
                try:
                    result[name], found = bars[name](str(folder), args)
                except NoNamespaces as error:
                    print(f"bar-tls cannot measure the link here: {error}", file=sys.stderr)
                    sys.exit(2)
            failures += found
    finish({"bar": "tls", "results": result}, failures)


if __name__ == "__main__":
    main()
