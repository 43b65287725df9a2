"""Units of systemd: a service for each shard of one machine, and a target that starts and stops them together.

A service per shard, not a template of one: a template cannot compute the port of an instance.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath

from embershard.deploy.manifests.deployment import PORT, BadDeployment, Deployment
from embershard.proto.security.tls import AUTHORITIES, CERTIFICATE, KEY, REVOKED

_HOST = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*", re.ASCII)
_NUMBERS = re.compile(r"[0-9.]+", re.ASCII)  # which is an IP address, or nothing
_COMMAND = re.compile(r"/.*|[0-9A-Za-z][^/]*")
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # from a service: ProtectHome and PrivateTmp, below

# What `systemd-analyze security` asks for and a shard can do without. Not MemoryDenyWriteExecute and ProcSubset: Numba
# loads compiled code, and a shard reads /proc for the memory of the machine.
_SANDBOX = """\
DynamicUser=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
PrivateDevices=yes
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
ProtectSystem=strict
RemoveIPC=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077
"""


def systemd_units(
    deployment: Deployment,
    *,
    host: str = "127.0.0.1",
    executable: str = "/usr/local/bin/embershard",
    first: int = 0,
    count: int | None = None,
    keys: PurePosixPath | None = None,
    access: PurePosixPath | None = None,
) -> dict[str, str]:
    """The text of each unit, by its file's name, for `count` shards of one machine from shard `first` on.

    They listen at `host`, from port 7700 on. `keys` is the folder of their certificates (docs/security.md), `access`
    the file that says who may do what; systemd hands both to them as credentials. BadDeployment where systemd would
    not start them, or where nobody could use them.
    """
    if keys is None and not _is_loopback(host):
        reason = "it can be reached from other machines: name the certificates of the shards (--tls)"
        raise BadDeployment(what=f"host {host}", reason=reason)
    for what, word in (("host", host), ("executable", executable), ("--tls", keys), ("--access", access)):
        if word is not None and not (str(word) and str(word).isprintable()):  # a line's end would begin another setting
            raise BadDeployment(what=f"{what} {str(word)!r}", reason="it has to be one line of text, and not empty")
    is_name = _HOST.fullmatch(host) and not _NUMBERS.fullmatch(host)
    if not (is_name or _is_ip(host)):
        raise BadDeployment(what=f"host {host!r}", reason="it is the name or the IP address of this machine")
    if not _COMMAND.fullmatch(executable):  # others are ignored, or change how systemd starts it (-, +, !)
        reason = "systemd takes a whole path, as /usr/local/bin/embershard, or a name that is in its own PATH"
        raise BadDeployment(what=f"executable {executable!r}", reason=reason)
    if keys is None and access is None:
        reason = "each service has a user of its own, whose token nobody else can read: say who may use the shards"
        raise BadDeployment(what=f"host {host}", reason=f"{reason} (--access), or name their certificates (--tls)")
    for folder in _folders(deployment.snapshots):
        if hidden := next((place for place in _HIDDEN if f"{folder}/".startswith(f"{place}/")), None):
            reason = f"a service cannot see the {hidden} of this machine: name a folder elsewhere, or a URL"
            raise BadDeployment(what=f"snapshots {folder}", reason=reason)
    address = f"[{host}]" if ":" in host else host
    shards = range(first, deployment.shards if count is None else first + count)
    target = f"embershard-{deployment.name}.target"
    units = {
        f"embershard-{deployment.name}-{shard}.service": _service(
            deployment, shard, f"{address}:{PORT + shard - first}", executable, target, keys, access
        )
        for shard in shards
    }
    wanted = " ".join(units)
    units[target] = (
        f"[Unit]\nDescription=Shards of {deployment.name}\nWants={wanted}\n\n[Install]\nWantedBy=multi-user.target\n"
    )
    return units


def _service(
    deployment: Deployment,
    shard: int,
    listen: str,
    executable: str,
    target: str,
    keys: PurePosixPath | None,
    access: PurePosixPath | None,
) -> str:
    own = f"embershard/{deployment.name}/{shard}"
    words = list(map(_escaped, [executable, *deployment.shard_words(shard=str(shard), listen=listen)]))
    credentials = []
    if deployment.durability != "memory":
        words += ["--log-dir", f"%S/{own}"]
    if keys is not None:
        credentials += [
            f"LoadCredential={name}:{str(keys / name).replace('%', '%%')}"
            for name in (CERTIFICATE, KEY, AUTHORITIES, REVOKED)
        ]
        credentials.append(f"SetCredential={REVOKED}:\\n")  # where there is no such file, which is no error then
        words += ["--tls", "%d"]
    if access is not None:
        credentials.append(f"LoadCredential=access.yaml:{str(access).replace('%', '%%')}")
        words += ["--access", "%d/access.yaml"]
    lines = [
        "[Unit]",
        f"Description=Shard {shard} of {deployment.shards} of {deployment.name}",
        "Wants=network-online.target",
        "After=network-online.target",
        f"PartOf={target}",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        "# a recovery from the log takes as long as it takes",
        "TimeoutStartSec=infinity",
        f"ExecStart={' '.join(words)}",
        *credentials,
        *_write_to(_folders(deployment.snapshots)),
        f"Environment=PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=%C/{own}",
        f"StateDirectory={own}",
        # not one for all shards, whose users differ: systemd would give all of it to the one that it starts last
        f"CacheDirectory={own}",
        "Restart=always",
        "RestartSec=1",
        "# a shard finishes what it has accepted, within 30 s",
        "TimeoutStopSec=45",
        f"MemoryMax={deployment.memory}M",
        "LimitNOFILE=65536",
        "OOMPolicy=stop",
    ]
    return "\n".join(lines) + "\n" + _SANDBOX + f"\n[Install]\nWantedBy={target}\n"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _folders(urls: tuple[str, ...]) -> list[str]:
    """Those of URLs that are folders of this machine."""
    return [path for url in urls if (path := url.removeprefix("file://")).startswith("/")]


def _write_to(folders: list[str]) -> list[str]:
    """The lines that let a service write to folders, as far as their permissions do."""
    if not folders:
        return []
    remark = "# the users of all shards need write access to these folders, and to all that is below them"
    return [remark, *(f"ReadWritePaths={_quoted(folder)}" for folder in folders)]


def _escaped(word: str) -> str:
    """A word as a line of ExecStart has it: no specifier, no variable, one word."""
    return _quoted(word.replace("$", "$$"))


def _quoted(word: str) -> str:
    """A word of a setting, in which a dollar is one: no specifier, one word."""
    word = word.replace("%", "%%")
    if any(c in word for c in " \t\"'\\;"):
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return word
