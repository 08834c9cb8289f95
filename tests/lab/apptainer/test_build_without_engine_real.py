"""``imgkit build --with apptainer``: a real runtime builds, and the files are those of a build by Docker."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_image
from labkit import (
    IMGKIT,
    docker,
    expect_failure,
    expect_success,
    imgkit,
    imgkit_json,
    output,
    public_folder,
    run,
    until,
)
from squashed_files import squashed_files

from imgkit_builder.inventory.collector import SPDX_PATH
from imgkit_builder.sif import image

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("without-engine")]

RECIPE = """
image:
  base: {base}
  args: {{COLOUR: "blue $x"}}
  env: {{WORDS: it's "a" word, EMPTY: '', PATH: "/opt/early/bin:$PATH", PYTHONPATH: "/opt/early:$PYTHONPATH"}}
  run:
    - command: |
        test -f /opt/early/run.sh && pwd > /opt/early/where
        for one in 1 2; do echo "$one $COLOUR \\ %s" >> /opt/early/lines; done
        cat > /opt/early/text <<END
        %files it's $COLOUR
        END
      after: base
    - umask 027; mkdir /odd && cd /odd && echo one > a && ln a b && ln -s a sym && mkfifo fifo && chmod 4755 a
  copy:
    - {{source: code, target: /workspace/code}}
    - {{source: code/deep, target: /opt/early, after: base}}
  labels: {{team: ours}}
system: {{scheduler: standalone}}
"""
TINY = """
image:
  base: tiny:1
  run: [{run}]
system: {{scheduler: standalone}}
"""
OWN = ("opt/imgkit/manifest.json", SPDX_PATH, "etc/resolv.conf", "etc/hosts")
"""Files whose content differs, as docs/guides/no-docker.md says, or over which a runtime mounts."""
MADE = (
    *(".singularity.d", ".exec", ".run", ".shell", ".test", "environment", "singularity"),
    *("dev", "proc", "sys"),
)
"""What an engine or a runtime makes."""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A folder that an ordinary user can write, with a recipe and its base."""

    folder: Path
    start: tuple[str, ...]
    """The argv that starts imgkit as that user."""
    built: dict[str, Any]


@pytest.fixture(scope="module")
def lab(standin_notorch, user, public_imgkit):
    folder = public_folder("without-engine")
    try:
        output("docker", "save", "-o", folder / "base.tar", standin_notorch)
        (folder / "code/deep").mkdir(parents=True)
        (folder / "code/a.py").write_text("print('a')\n")
        (folder / "code/link.py").symlink_to("a.py")
        (folder / "code/deep/run.sh").write_text("#!/bin/sh\n")
        (folder / "code/deep/run.sh").chmod(0o700)
        (folder / "mine.yaml").write_text(RECIPE.format(base=standin_notorch))
        output("chown", "-R", user, folder)
        places = f"{Path(shutil.which('singularity') or '').parent}:/usr/bin:/bin:/usr/sbin"
        who = ("runuser", "-u", user, "--") if os.geteuid() == 0 else ()
        home = f"HOME=/home/{user}"
        start = (*who, "env", "-i", f"PATH={places}", home, "LC_ALL=C.UTF-8", str(public_imgkit))
        words = ("build", "mine.yaml", "--with", "apptainer", "--base-from", "base.tar", "--json")
        # Modes must not depend on the umask.
        shell = ("sh", "-c", 'umask 077; exec "$@"', "sh")
        built = json.loads(output(*shell, *start, *words, folder=folder))
        yield Lab(folder=folder, start=start, built=built)
    finally:
        shutil.rmtree(folder)


def shown(path, *, owners=False):
    """What a runtime shows of a .sif, without times and without what runtimes make."""
    return {
        name: (file.mode, file.content, *((file.uid, file.gid) if owners else ()))
        for name, file in squashed_files(path).items()
        if name.partition("/")[0] not in MADE
        and name not in (*OWN, ".dockerenv", "etc/hostname", "etc/mtab")
        and "__pycache__" not in name  # byte code holds the times of its sources
    }


@pytest.mark.soak
def test_files_are_those_of_a_docker_build(lab, standin_notorch):
    name = f"imgkit-test-both:{secrets.token_hex(4)}"
    try:
        words = ("build", "./mine.yaml", "--base", standin_notorch, "--tag", name, "--no-test")
        imgkit_json(*words, folder=lab.folder)
        imgkit_json("sif", name, "-o", "docker.sif", "--no-test", folder=lab.folder)
    finally:
        docker("rmi --force", name)
    ours, theirs = shown(lab.folder / "mine.sif"), shown(lab.folder / "docker.sif")
    assert sorted(ours.keys() ^ theirs.keys()) == []
    assert {path: (ours[path], theirs[path]) for path in ours if ours[path] != theirs[path]} == {}
    assert ours["workspace/code/deep/run.sh"][1] == 0o755
    assert ours["workspace/code/link.py"][2] == "a.py"


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_keeps_every_owner(lab, standin_notorch):
    words = ("build", "./mine.yaml", "--with", "apptainer", "--base-from", "base.tar", "--no-test")
    imgkit_json(*words, "-o", "root.sif", folder=lab.folder)
    imgkit_json("sif base.tar -o base.sif --no-test", folder=lab.folder)
    before, after = (shown(lab.folder / name, owners=True) for name in ("base.sif", "root.sif"))
    kept = {path: after[path] for path in before if path in after}
    assert {path for path in kept if kept[path][-2:] != before[path][-2:]} == set()
    assert any(entry[-1] == 42 for entry in kept.values()), "the base has a file of the group shadow"


def test_ordinary_user_gets_a_tested_file(lab):
    built = lab.built
    assert [one["verdict"] for one in built["checks"] if one["verdict"] not in ("ok", "skip")] == []
    assert built["labels"]["team"] == "ours"
    assert built["labels"]["imgkit.recipe"] == "mine"
    path = lab.folder / "mine.sif"
    sif = image.read(path)
    assert sif.record is not None
    assert (sif.record.route, sif.record.image_id) == ("definition", built["id"])
    image.refuse_damaged(path)
    script = 'printf "%s|" "$WORDS" "${EMPTY-unset}"; cat /workspace/code/a.py'
    assert output("singularity", "exec", path, "sh", "-c", script) == "it's \"a\" word||print('a')\n"
    assert not [one.name for one in lab.folder.iterdir() if one.name.startswith(".")]


@pytest.mark.soak
def test_variables_of_a_sif_base_are_known(lab, standin_notorch):
    text = f"image: {{base: '{standin_notorch}', env: {{OWN: own}}}}\nsystem: {{scheduler: standalone}}\n"
    (lab.folder / "second.yaml").write_text(text)
    words = ("build", "second.yaml", "--with", "apptainer", "--base-from", "mine.sif", "--json")
    built = json.loads(output(*lab.start, *words, folder=lab.folder))
    # Its smoke test compares the manifest with what imgkit has read during the build.
    assert [one["verdict"] for one in built["checks"] if one["verdict"] not in ("ok", "skip")] == []
    path = lab.folder / "second.sif"
    found = json.loads(output("singularity", "exec", path, "cat", "/opt/imgkit/manifest.json"))
    base = found["base"]["env"]
    assert (base["WORDS"], base["EMPTY"]) == ('it\'s "a" word', "")
    assert "/usr/bin" in base["PATH"].split(":")
    assert not {"PWD", "HOME", "SINGULARITY_NAME", "APPTAINER_NAME"} & base.keys()
    assert found["env"] == {"OWN": "own"}


@pytest.fixture
def tiny(tmp_path):
    """A folder with a base of 2 MB, in which nothing of Python works."""
    tiny_image.write(tmp_path / "tiny.tar", "tiny:1")
    return tmp_path


def build(folder, run_step, *more, base="tiny.tar"):
    (folder / "small.yaml").write_text(TINY.format(run=json.dumps(run_step)))
    words = ("build", "./small.yaml", "--with", "apptainer", "--base-from", base, "--no-test")
    return imgkit(*words, *more, folder=folder)


def left(folder):
    return sorted(one.name for one in folder.iterdir() if one.name.startswith("."))


def test_failed_step_shows_its_last_lines(tiny):
    done = expect_failure(build(tiny, "echo https://ana:hunter2pw@x/; echo before; exit 7", "-v"), 4)
    assert "hunter2pw" not in done.stderr
    shown = done.stderr.partition("failed with exit code")[2]
    assert "https://*************@x/\n" in shown
    assert "before\n" in shown
    log = Path(done.stderr.split("the full log: ")[1].strip())
    assert "Bootstrap: oci" in log.read_text()
    assert "hunter2pw" not in log.read_text()
    log.unlink()
    assert left(tiny) == []
    assert not (tiny / "small.sif").exists()


@pytest.mark.soak
def test_sif_is_a_base(tiny):
    assert build(tiny, "echo 1 > /one", "-o", "one.sif").returncode == 0
    expect_success(build(tiny, "echo 2 > /two", "-o", "two.sif", base="one.sif"))
    assert output("singularity", "exec", tiny / "two.sif", "/bin/cat", "/one", "/two") == "1\n2\n"


@pytest.mark.soak
def test_oci_folder_with_a_blank_is_a_base(tiny):
    with tarfile.open(tiny / "tiny.tar") as archive:
        archive.extractall(tiny / "an image", filter="data")
    assert build(tiny, "true", base="an image").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_little_space_is_named_first(tiny):
    small = tiny / "small disk"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small)
    try:
        expect_failure(build(tiny, "true", "-o", small / "x.sif"), 1, "are free, an image of")
        assert left(small) == []
    finally:
        run("umount", small)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_build_leaves_the_old_file(tiny, number):
    assert build(tiny, "echo 1 > /one").returncode == 0
    old = (tiny / "small.sif").read_bytes()
    (tiny / "small.yaml").write_text(TINY.format(run=json.dumps("echo here; while true; do true; done")))
    words = (*IMGKIT, "build", "./small.yaml", "--with", "apptainer", "--base-from", "tiny.tar", "--no-test")
    with subprocess.Popen(words, cwd=tiny, stderr=subprocess.PIPE, text=True) as program:
        for line in program.stderr:
            if "echo here" in line:
                break
        time.sleep(0.2)
        program.send_signal(number)
        program.stderr.read()
    until(lambda: not run("pgrep", "-f", f"^.*{tiny}/[.]imgkit-sif").stdout)
    assert (tiny / "small.sif").read_bytes() == old
    if number == signal.SIGKILL:
        assert build(tiny, "echo 2 > /two").returncode == 0
    assert left(tiny) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--tag", "x:1"), "--tag cannot be used --with apptainer"),
        (("--builder", "buildx"), "--builder cannot be used --with apptainer"),
        (("--platform", "linux/arm64"), "--with apptainer builds for this machine's platform"),
        (("--base-from", "absent.tar"), "there is no such base"),
        (("--runtime-command", "/absent"), "/absent is not on PATH"),
    ],
)
def test_impossible_requests_are_refused(tiny, more, said):
    done = build(tiny, "true", *more)
    assert done.returncode in (2, 3), done.stderr
    assert said in done.stderr
    assert left(tiny) == []


def test_secrets_are_refused_at_their_line(tiny):
    recipe = TINY.replace("{run}", "{{command: 'true', secrets: [token]}}").format()
    (tiny / "s.yaml").write_text(f"{recipe}\n".replace("run:", "secrets: [{id: token, env: X}]\n  run:"))
    expect_failure(
        imgkit("build ./s.yaml --with apptainer --base-from tiny.tar", folder=tiny),
        2,
        "s.yaml:4: --with apptainer has no build secrets",
    )


@pytest.mark.soak
def test_damaged_base_is_refused(tiny):
    assert build(tiny, "true", "-o", "one.sif").returncode == 0
    data = bytearray((tiny / "one.sif").read_bytes())
    data[-len(data) // 2] ^= 1
    (tiny / "one.sif").write_bytes(data)
    expect_failure(build(tiny, "true", "-o", "two.sif", base="one.sif"), 1, "the base is damaged")
    assert not (tiny / "two.sif").exists()
