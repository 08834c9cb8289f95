"""``imgkit sign``, and what other verbs do with signatures."""

from __future__ import annotations

from pathlib import Path

import typer

from imgkit_builder.cli.common import JSON, RUNTIME, show
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

SCHEMA = 1

REQUIRE_SIGNATURE: Path | None = typer.Option(
    None,
    "--require-signature",
    metavar="KEYRING",
    help="Refuse files that no key in KEYRING signed: OpenPGP keys (gpg --export), or a public key in PEM.",
)


def verb_sign(
    file: Path = typer.Argument(
        metavar="FILE", help="A .sif, a .sqsh, a delta, or an archive from imgkit save."
    ),
    key: Path | None = typer.Option(
        None, "--key", metavar="FILE.pem", help="For a .sif: private key in PEM."
    ),
    keyidx: int | None = typer.Option(
        None, "--keyidx", metavar="N", help="For a .sif: OpenPGP key N of: singularity key list --secret."
    ),
    gpg_key: str = typer.Option(
        "",
        "--gpg-key",
        metavar="ID",
        help="For a .sqsh, a delta or an archive: gpg's key (default: gpg's own).",
    ),
    runtime: str | None = RUNTIME,
    as_json: bool = JSON,
) -> None:
    """Sign a .sif, a .sqsh, a delta or an archive.

    The passphrase is prompted for, never taken from the command line. Singularity or
    Apptainer adds a signature object to a .sif. For a .sqsh or delta gpg writes
    FILE.asc, and for an archive a signature of its manifest.

    \b
    Examples:
      imgkit sign mn5.sif --keyidx 0
      imgkit sign mn5.sif --key private.pem
      imgkit sign mn5.imgdelta --gpg-key me@example.org
      imgkit verify mn5.sif --keyring trusted.asc
    """
    from imgkit_builder.sif import image
    from imgkit_builder.signing import signatures

    if not file.is_file():
        raise UsageError("there is no such file", where=str(file))
    if not image.is_sif(file):
        if key is not None or keyidx is not None:
            raise UsageError("--key and --keyidx sign a .sif", where=str(file), hint=f"imgkit sign {file}")
        made = signatures.sign_detached(file, gpg_key)
    elif gpg_key or (key is None) == (keyidx is None):
        hint = f"imgkit sign {file} --keyidx 0, or --key FILE.pem"
        raise UsageError("a .sif is signed by either --key or --keyidx", where=str(file), hint=hint)
    else:
        way = ("--key", str(key.absolute())) if key else ("--keyidx", str(keyidx))
        signatures.sign_sif(file, way, runtime)
        made = file
    lines = (f"{made}  signed", f"next:  imgkit verify {file} --keyring KEYRING")
    show({"schema": SCHEMA, "file": str(file), "signature": str(made)}, *lines, as_json=as_json)


def require_signatures(keyring: Path | None, *paths: Path) -> None:
    """Print who signed each of `paths`; does nothing without a keyring.

    Raises
    ------
    CheckFailed : a file is unsigned, changed, or signed by nobody in `keyring`.
    """
    from imgkit_builder.signing import signatures

    for path in paths if keyring else ():
        assert keyring is not None  # noqa: S101 - for the type checker
        terminal.err(f"imgkit: {path.name} is signed by {signatures.require(path, keyring)}")
