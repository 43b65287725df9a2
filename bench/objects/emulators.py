"""Object storages on this machine, and the link to them: moto's server for S3, gcp-storage-emulator for Google's."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "ember"
_START_SECONDS = 60
_CHUNK = 1 << 16

# the server asks for no signature until a user was made: as many requests as this makes
_MAKE_USER = """
import boto3, json, sys
options = dict(endpoint_url=sys.argv[1], aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
iam, s3 = boto3.client("iam", **options), boto3.client("s3", **options)
iam.create_user(UserName="ember")
allow = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": sys.argv[2:]}]}
iam.put_user_policy(UserName="ember", PolicyName="bucket", PolicyDocument=json.dumps(allow))
key = iam.create_access_key(UserName="ember")["AccessKey"]
for bucket in ("ember", "foreign"):
    s3.create_bucket(Bucket=bucket)
print(json.dumps({"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}))
"""
_REQUESTS_TO_MAKE_USER = 5


@dataclass(frozen=True)
class ObjectStorage:
    """A storage that serves. `environment` is what a process needs to reach it, `port` where it listens."""

    scheme: str
    port: int
    environment: Mapping[str, str]

    def through(self, link: Link) -> dict[str, str]:
        """The environment of processes that reach it over a link."""
        return {name: value.replace(f":{self.port}", f":{link.port}") for name, value in self.environment.items()}

    def url(self, path: str) -> str:
        """A place in the bucket."""
        return f"{self.scheme}://{BUCKET}/{path}"


@contextmanager
def s3(python: Path) -> Iterator[ObjectStorage]:
    """moto's server, which checks signatures and rights; `python` has moto."""
    port = _free_port()
    words = [str(python.with_name("moto_server")), "--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with _running(words, port, INITIAL_NO_AUTH_ACTION_COUNT=str(_REQUESTS_TO_MAKE_USER)):
        allowed = [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]
        made = subprocess.run(
            [python, "-c", _MAKE_USER, address, *allowed], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise SystemExit(f"moto: {made.stderr[-2000:]}")
        region = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}
        yield ObjectStorage("s3", port, {**json.loads(made.stdout), **region})


@contextmanager
def gs(python: Path) -> Iterator[ObjectStorage]:
    """gcp-storage-emulator, which asks nobody for credentials; `python` has it."""
    port = _free_port()
    words = [str(python.with_name("gcp-storage-emulator")), "start", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--in-memory", "--default-bucket", BUCKET]
    address = f"http://127.0.0.1:{port}"
    with _running(words, port):
        yield ObjectStorage("gs", port, {"STORAGE_EMULATOR_HOST": address, "GOOGLE_CLOUD_PROJECT": "ember"})


@contextmanager
def _running(words: list[str], port: int, **variables: str) -> Iterator[None]:
    with subprocess.Popen(
        words, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            end = time.monotonic() + _START_SECONDS
            while True:
                with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), 5)):
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{words[0]} does not serve")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Link:
    """Passes bytes to a port of this machine and back: as fast as it is, slower, or not at all.

    `uploaded` counts the bytes that went to the storage.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self.uploaded = 0
        self.bytes_per_second: float | None = None
        self._target, self._is_cut = target, False
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()

    @contextmanager
    def serving(self) -> Iterator[Link]:
        """While it runs."""
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = int(server.sockets[0].getsockname()[1])
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.cut()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(10)

    def cut(self) -> None:
        """Break all connections, and refuse others until `mend`."""
        self._loop.call_soon_threadsafe(self._set_cut, True)

    def mend(self) -> None:
        """Take connections again."""
        self._loop.call_soon_threadsafe(self._set_cut, False)

    def _set_cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        for writer in self._writers if is_cut else ():
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, back}
        with suppress(OSError):
            await asyncio.gather(self._pass_on(reader, back, uploads=True), self._pass_on(there, writer, uploads=False))
        for one in (writer, back):
            one.transport.abort()
            self._writers.discard(one)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, uploads: bool) -> None:
        while data := await reader.read(_CHUNK):
            self.uploaded += len(data) if uploads else 0
            if self.bytes_per_second is not None:
                await asyncio.sleep(len(data) / self.bytes_per_second)
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


@contextmanager
def storages(python: Path, names: tuple[str, ...]) -> Iterator[dict[str, ObjectStorage]]:
    """Those of these schemes, while they serve."""
    with ExitStack() as stack:
        yield {name: stack.enter_context({"s3": s3, "gs": gs}[name](python)) for name in names}
