"""`embershard keys`: what shards and clients know each other by: certificates, and tokens."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509

from embershard.cli.tokens import show, token
from embershard.deploy.authority import Authority, CannotIssue, general_name, replace_file, write_new
from embershard.proto.security.tls import AUTHORITIES, CERTIFICATE, REVOKED

keys = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Create certificates and tokens, and show access rules."
)
keys.command()(token)
keys.command()(show)

AuthorityFolder = Annotated[
    Path, typer.Option("--authority", "-a", metavar="DIR", help="The folder that `embershard keys init` made.")
]


@keys.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder for the authority's key.")],
    name: Annotated[str, typer.Option(help="Name of the authority, for people.")] = "embershard lab",
) -> None:
    """Create a certificate authority. Keep its key (DIR/ca.key) secret: with it anyone can join every job that trusts
    it.
    """
    Authority.create(name).save(folder)
    typer.echo(f"{folder / AUTHORITIES} and its key; issue certificates with `embershard keys issue NAME -a {folder}`")


@keys.command("issue")
def issue(
    name: Annotated[str, typer.Argument(help="Name in the certificate, such as shard-0 or worker.")],
    authority: AuthorityFolder,
    covered: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            help="Host name or IP address of a shard, or an identity (spiffe://..., an e-mail address); "
            "may be repeated.  [default: NAME]",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="Days for which it is valid; at most as long as the authority.", min=1, max=3650)
    ] = 365,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for its files.  [default: NAME in the authority's folder]"),
    ] = None,
) -> None:
    """Issue a certificate: a folder for --tls, with tls.crt, tls.key and ca.crt."""
    names = covered or [name]
    for one in names:
        try:
            general_name(one)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if output is None and (not name or "/" in name or name.startswith(".")):
        raise typer.BadParameter(f"{name!r} cannot be the name of a folder; say where the files go with --output")
    folder = authority / name if output is None else output
    files = Authority.load(authority).issue(name, names, timedelta(days=days))
    write_new(folder, files)
    end = x509.load_pem_x509_certificate(files[CERTIFICATE]).not_valid_after_utc
    typer.echo(f"{folder}: a certificate of {name!r} for {', '.join(names)}, valid until {end:%Y-%m-%d}")


@keys.command("revoke")
def revoke(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of the certificates to revoke.")],
    authority: AuthorityFolder,
) -> None:
    """Revoke certificates: write crl.pem, which you copy into the --tls folder of every shard and worker."""
    from cryptography.exceptions import InvalidSignature

    ours, path = Authority.load(authority), authority / REVOKED
    data = b""
    try:
        data = path.read_bytes()
        x509.load_pem_x509_crl(data)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = f"no revocation list can be read ({getattr(error, 'strerror', None) or error})"
        raise CannotIssue(path=str(path), reason=f"{reason}; copy it back from the folder of a shard") from None
    for folder in folders:
        try:
            certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        except (OSError, ValueError) as error:
            reason = f"no certificate can be read ({getattr(error, 'strerror', None) or error})"
            remedy = "name the folders that `embershard keys issue` wrote"
            raise CannotIssue(path=str(folder / CERTIFICATE), reason=f"{reason}; {remedy}") from None
        try:
            certificate.verify_directly_issued_by(ours.certificate)
        except (InvalidSignature, ValueError, TypeError):
            raise CannotIssue(
                path=str(folder / CERTIFICATE), reason="another authority has issued it; name its folder with -a"
            ) from None
        data = ours.revoke(certificate, data)
    replace_file(path, data)
    typer.echo(f"{path}: copy it into the folder of every shard and worker; they use it within 10 s")
