"""zstd where it can be made and mounted, gzip else, and never silently."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from file_tree import write_program

from imgkit_builder.archive import sidecar
from imgkit_builder.sif import conversion, mksquashfs
from imgkit_builder.sif.conversion import Compression, Options
from imgkit_builder.sif.runtime import Capabilities
from imgkit_builder.workflow.convert import compression_for, plan_conversion
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import CompressionChoice, Runtime, SystemFacts

WRITTEN = Path(__file__).parents[3] / "written/0.3.0"
NEW = Capabilities(mksquashfs_args=True, disable_cache=True)
OLD = Capabilities(mksquashfs_args=False, disable_cache=True)


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A fake that prints `text` as its help, alone on PATH."""
    write_program(tmp_path / "mksquashfs", f"cat <<'EOF'\n{text}\nEOF\nexit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def choose(capabilities: Capabilities | None, choice: CompressionChoice) -> Compression:
    zstd_error = mksquashfs.zstd_error(mksquashfs.find_any())
    return conversion.choose_compression(capabilities, choice, zstd_error=zstd_error)


FULL = "-tar\t\tread uncompressed tar file\n\t\t\t\tgzip (default)\n\t\t\t\tzstd"


@pytest.mark.parametrize(
    ("release", "reads"),
    [
        ("6.1.0-18-amd64", True),
        ("4.14.0", True),
        ("4.12.14-122", False),
        ("3.10.0-1160.el7", False),
        ("odd", True),
    ],
)
def test_kernel_release_understood(release, reads):
    assert conversion.kernel_reads_zstd(release) is reads


def test_zstd_by_default(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, FULL)
    assert choose(NEW, "auto") == choose(None, "auto") == conversion.ZSTD
    assert choose(NEW, "gzip") == conversion.GZIP


@pytest.mark.parametrize(
    ("help_text", "kernel_reads", "message"),
    [("-tar\n\t\tgzip (default)\n\t\txz", True, "built without zstd"), (FULL, False, "cannot mount zstd")],
)
def test_gzip_without_zstd_here_or_on_old_kernels(tmp_path, monkeypatch, help_text, kernel_reads, message):
    install(tmp_path, monkeypatch, help_text)
    monkeypatch.setattr(conversion, "kernel_reads_zstd", lambda: kernel_reads)
    assert choose(None, "auto") == conversion.GZIP
    with pytest.raises(UsageError, match=message):
        choose(NEW, "zstd")


def test_runtime_that_takes_no_options_says_so():
    chosen = choose(OLD, "auto")
    assert chosen.options == ()
    assert "gzip 9 by default" in chosen.note


@pytest.mark.parametrize(
    ("of_system", "option", "expected"),
    [
        ("auto", "auto", "auto"),
        ("zstd", "auto", "zstd"),
        ("zstd", "gzip", "gzip"),
        ("gzip", "zstd", "zstd"),
        ("gzip", "auto", "gzip"),
    ],
)
def test_option_counts_before_the_system(of_system, option, expected):
    assert compression_for(SystemFacts(runtime=Runtime(compression=of_system)), option) == expected
    assert compression_for(None, option) == option


@pytest.mark.parametrize(
    ("args", "expected"), [((), "-comp zstd "), (("--compression", "gzip"), "-comp gzip ")]
)
def test_archive_gets_the_compression_of_its_system(args, expected, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, FULL)
    for name in ("small.tar.gz", "small.tar.gz.sha256"):
        shutil.copy(WRITTEN / name, tmp_path)
    described = sidecar.read_sidecar(WRITTEN / "small.tar.gz")
    assert described
    facts = SystemFacts(runtime=Runtime(compression="zstd"))
    (tmp_path / "small.tar.gz.manifest.json").write_text(
        sidecar.to_json(dataclasses.replace(described, system=facts))
    )
    request = Options(format="sqsh", compression="gzip" if args else "auto")
    _, lines = plan_conversion(tmp_path / "small.tar.gz", None, request)
    assert expected in "\n".join(lines)
