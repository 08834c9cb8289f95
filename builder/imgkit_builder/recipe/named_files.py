"""Checks the content of files that a recipe names."""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.recipe.problems import Collector, KeyPath, Position


def certificate(file: Path, position: Position, path: KeyPath, found: Collector) -> None:
    """Report a file of ``image.ca`` that is not a certificate as PEM text, or that holds a private key."""
    try:
        data = file.read_bytes()
    except OSError as error:
        found.error(position, path, f"{file.name} cannot be read: {error.strerror}")
        return
    if b"PRIVATE KEY-----" in data:
        hint = f"keep only the certificate: openssl x509 -in {file.name} -out certificate.crt"
        found.error(position, path, f"{file.name} holds a private key, which would be in the image", hint)
    elif b"-----BEGIN CERTIFICATE-----" not in data:
        hint = f"if it is DER, convert it: openssl x509 -inform der -in {file.name} -out certificate.crt"
        found.error(position, path, f"{file.name} is not a certificate in PEM form", hint)
