"""A .sif that imgkit wrote itself behaves under the real runtime as one that the runtime built."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import find, settings
from hypothesis import strategies as some
from labkit import IMGKIT, imgkit, imgkit_json, output, public_folder, run
from stored_images import archive, busybox_layer, only
from tars import tar_entry

PROGRAMS = ("sh", "cat", "env", "echo", "ls", "sleep")
SHOW = b"""#!/bin/sh
for word in "$@"; do printf '<%s>' "$word"; done
"""
VALUE = b"""#!/bin/sh
eval "echo \\"\\$$1\\""
"""
NASTY = ("a b", "q'uote", '"double"', "back\\slash", "$HOME", "`echo no`", "*", "", "new\nline", "é")
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
LOADED = Path("/bin/ls")

pytestmark = [
    pytest.mark.singularity,
    pytest.mark.xdist_group("own writer"),
    pytest.mark.programs("busybox"),
]


def layer():
    return [*busybox_layer(*PROGRAMS), tar_entry("bin/show", SHOW), tar_entry("bin/value", VALUE)]


ENV = (
    "PATH=/own/bin:/bin",
    "BAKED=from the image",
    "LD_LIBRARY_PATH=/own/lib",
    "TWICE=1",
    "TWICE=2",
    "not-a-name=x",
    "EMPTY=",
)


@pytest.fixture(scope="module")
def folder():
    """A folder that every user can enter."""
    folder = public_folder("writer")
    yield folder
    shutil.rmtree(folder)


def converted(folder, name, *, by_runtime=False, **config):
    """An image with `config` as a .sif; `by_runtime` hides mksquashfs, so that the runtime builds."""
    (folder / f"{name}.tar").write_bytes(archive([layer()], config=config))
    env = only("runtime", folder) if by_runtime else {}
    target = folder / f"{name}{'-built' if by_runtime else ''}.sif"
    answer = imgkit_json("sif", folder / f"{name}.tar", "-o", target, "--no-test", env=env)
    assert answer["record"]["route"] == ("layers" if by_runtime else "stream")
    return target


@pytest.fixture(scope="module")
def sif(folder):
    return converted(folder, "made", Env=ENV, Entrypoint=["show"], Labels={"weird": 'q"uote <&>'})


def singularity(as_user, *args, **options):
    return output(*as_user, "singularity", *args, folder="/", **options)


@pytest.mark.parametrize(
    ("args", "stdin", "expected"),
    [
        (("exec", "{}", "value", "BAKED"), "", "from the image\n"),
        (("exec", "--cleanenv", "{}", "value", "TWICE"), "", "2\n"),
        (("exec", "--containall", "{}", "value", "BAKED"), "", "from the image\n"),
        (("exec", "--env", "BAKED=mine", "{}", "value", "BAKED"), "", "mine\n"),
        (("run", "{}"), "", ""),
        (("run", "{}", "a b", "q'uote", "c"), "", "<a b><q'uote><c>"),
        (("shell", "{}"), "echo in $BAKED\n", "in from the image\n"),
        (("test", "{}"), "", ""),
        (("inspect", "--labels", "{}"), "", 'weird: q"uote <&>\n'),
        (("inspect", "--runscript", "{}"), "", "exec"),
        (("inspect", "--environment", "{}"), "", "BAKED='from the image'"),
        (("inspect", "--deffile", "{}"), "", "bootstrap: oci\nfrom: sha256:"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_verbs_of_the_runtime(sif, as_user, args, stdin, expected):
    text = singularity(as_user, *(argument.format(sif) for argument in args), stdin=stdin)
    assert text == expected if args[0] in ("exec", "run") else expected in text


def test_users_variables_reach_the_image(sif, as_user):
    script = "echo $BAKED; echo $PATH; echo $LD_LIBRARY_PATH; echo ${OTHER-unset}; echo ${EMPTY-unset}"
    env = ("env", "SINGULARITYENV_BAKED=mine", "APPTAINERENV_PREPEND_PATH=/first", "OTHER=host")
    lines = singularity((*as_user, *env), "exec", sif, "sh", "-c", script).splitlines()
    assert lines[0] == "mine"
    assert lines[1].startswith("/first:/own/bin:/bin")
    assert lines[2] == "/own/lib:/.singularity.d/libs"
    assert lines[3:] == ["host", ""]


def test_exported_value_of_the_host_gives_way(sif):
    """A .sif that the runtime built does the same; SINGULARITYENV_ and --env are the ways."""
    text = singularity(("env", "BAKED=host"), "exec", sif, "value", "BAKED")
    assert text == "from the image\n"


def test_name_that_no_shell_can_set_is_left_out(folder, sif):
    result = imgkit("sif", folder / "made.tar", "-o", folder / "again.sif", "--no-test")
    assert "'not-a-name'" in result.stderr
    assert (folder / "again.sif").read_bytes() == sif.read_bytes()


def test_instance_starts_and_stops(sif):
    name = f"imgkit-{os.getpid()}"
    output("singularity", "instance", "start", sif, name)
    try:
        text = output("singularity", "exec", f"instance://{name}", "value", "BAKED")
        assert text == "from the image\n"
    finally:
        output("singularity", "instance", "stop", name)


@pytest.mark.skipif(not LOADER.exists(), reason="the loader of another architecture has another name")
def test_loader_finds_libraries_bound_for_nv(folder, as_user):
    """``--nv`` binds files into the same folder. One library of /bin/ls is there and nowhere else."""
    locations = dict(line.split(" => ") for line in output("ldd", LOADED).splitlines() if " => " in line)
    libraries = {name.strip(): Path(location.split(" (")[0]) for name, location in locations.items()}
    (missing,) = [name for name in libraries if name.startswith("libselinux")] or [next(iter(libraries))]
    libraries_in_image = [
        tar_entry(f"lib/{name}", path.read_bytes()) for name, path in libraries.items() if name != missing
    ]
    programs = [
        tar_entry("lib64/ld-linux-x86-64.so.2", LOADER.read_bytes()),
        tar_entry("bin/ls", LOADED.read_bytes()),
    ]
    (folder / "loader.tar").write_bytes(
        archive([[*libraries_in_image, *programs]], config={"Env": ["PATH=/bin"]})
    )
    path = folder / "loader.sif"
    assert imgkit("sif", folder / "loader.tar", "-o", path, "--no-test", "--force").returncode == 0
    assert run(*as_user, "singularity", "exec", path, "ls", "/", folder="/").returncode != 0
    bound = f"{libraries[missing]}:/.singularity.d/libs/{missing}"
    assert "bin" in singularity(as_user, "exec", "--bind", bound, path, "ls", "/")


def test_values_arrive_byte_by_byte(folder):
    """Forty random values, in one start of the runtime."""
    texts = some.text(some.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
    shell = some.text(alphabet="$`'\"\\ \n!*~#&;(){}[]<>|é=a", min_size=1, max_size=30)
    values: list[str] = []
    for strategy in (texts, shell):
        drawn = some.lists(strategy, min_size=20, max_size=20)
        values += find(drawn, lambda texts: len(set(texts)) > 15, settings=settings(database=None))
    values += ["$(touch /tmp/no)", "a'b", 'a"b', "`x`", "\n\n", "\\", "${HOME}", "-n", " lead"]
    names = [f"V{number}" for number in range(len(values))]
    env = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
    path = converted(folder, "values", Env=["PATH=/bin", *env])
    process = run("singularity", "exec", "--cleanenv", path, "cat", "/proc/self/environ")
    assert process.returncode == 0, process.stderr
    variables = dict(item.split("=", 1) for item in process.stdout.split("\0") if "=" in item)
    assert {name: variables.get(name) for name in names} == dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    "config",
    [
        {"Entrypoint": ["show", "ep $HOME", "it's"]},
        {"Cmd": ["show", "cmd `x`"]},
        {"Entrypoint": ["show", "ep"], "Cmd": ["c m d", "$HOME"]},
    ],
    ids=["entrypoint", "cmd", "both"],
)
def test_run_is_that_of_a_build(folder, config):
    written = converted(folder, "run", Env=["PATH=/bin"], **config)
    built = converted(folder, "run", by_runtime=True, Env=["PATH=/bin"], **config)
    first = () if "Entrypoint" in config else ("show",)
    for options in ((), ("--no-eval",)):
        for args in ((), (*first, *NASTY)):
            ran = [run("singularity", "run", *options, path, *args) for path in (written, built)]
            assert ran[0].stdout == ran[1].stdout, (options, args)
            assert ran[0].returncode == ran[1].returncode
            assert "<" in ran[0].stdout
    written.unlink()
    built.unlink()


def test_runtime_signs_all_of_it(sif):
    groups = {
        line.split("|")[1].strip() for line in output("singularity", "sif", "list", sif).splitlines()[3:]
    }
    assert groups == {"1"}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_archive_from_standard_input_gives_the_same_bytes(folder, sif, packed):
    """A pipe cannot be read twice, so that imgkit puts it on disk first."""
    data = (folder / "made.tar").read_bytes()
    argv = (*IMGKIT, "sif", "-", "--no-test")
    archive_bytes = gzip.compress(data) if packed else data
    result = subprocess.run(
        [*argv, "-o", folder / "piped.sif"], input=archive_bytes, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (folder / "piped.sif").read_bytes() == sif.read_bytes()
    (folder / "piped.sif").unlink()
    assert not list(folder.glob(".*"))
    nameless = subprocess.run(argv, input=archive_bytes, capture_output=True, check=False, cwd=folder)
    assert nameless.returncode == 2
    assert b"-o FILE.sif" in nameless.stderr
