"""What a researcher puts into an image, on a real engine: authorities, projects, steps after code."""

from __future__ import annotations

import json
import os
import re
import ssl

import pytest
from labkit import ROOT, docker, host_address, imgkit, imgkit_json, output
from package_index import serve_folder, write_links, write_wheel

pytestmark = pytest.mark.docker

NAME = f"imgkit-test-inputs-{os.getpid()}"
TAG = f"{NAME}:latest"


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A package index behind a private authority: its address as containers see it, and the certificate."""
    host = host_address()
    folder = tmp_path_factory.mktemp("index")
    key, certificate = folder / "key.pem", folder / "company.crt"
    request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test")
    output(*request, "-addext", f"subjectAltName=IP:{host}", "-keyout", key, "-out", certificate)
    for name in ("imgkit-test-one", "imgkit-test-two"):
        package = folder / "simple" / name
        package.mkdir(parents=True)
        write_links(package, [write_wheel(package, name, "1.0", code=f"NAME = {name!r}\n")])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serve_folder(folder, host, tls=context) as address:
        yield f"https://{address}/simple", certificate


def recipe(folder, text):
    file = folder / f"{NAME}.yaml"
    file.write_text(text)
    return file


def inside(image, *commands):
    """Run commands that print one line each in one container, and return the lines."""
    return output(
        "docker", "run", "--rm", "--entrypoint", "sh", image, "-c", "\n".join(commands)
    ).splitlines()


PIP = """
  pip:
    - packages: [imgkit-test-one]
      options: [--index-url, "{url}", --retries, "0"]
"""


PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "inplay"
version = "1"
[tool.setuptools]
py-modules = ["inplay"]
"""


def test_own_code_behind_a_private_authority(index, standin_notorch, tmp_path):
    url, certificate = index
    (tmp_path / "company.crt").write_bytes(certificate.read_bytes())
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hello.txt").write_text("hello\n")
    (tmp_path / "inplay.py").write_text("WHO = 'one'\n")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / ".dockerignore").write_text("code\n")
    text = f"""
image:
  base: registry.invalid/base:1
  ca: [company.crt]{PIP.format(url=url)}
      env: {{MAX_JOBS: "3", PIP_REPORT: /opt/report.json}}
    - {{project: ., editable: /workspace/mine, options: [--no-index, --no-build-isolation]}}
  run:
    - test ! -e /workspace/hello.txt && test -z "$MAX_JOBS"
    - {{command: tr a-z A-Z < hello.txt > loud.txt, after: copy}}
    - python3 -c "import urllib.request as u; u.urlopen('{url}/')"
  copy: [{{source: code}}]
"""
    try:
        built = imgkit_json("build", recipe(tmp_path, text), "--base", standin_notorch, "--no-test")
        env = json.loads(docker("inspect", "--format", "{{json .Config.Env}}", TAG))
        assert not any(entry.startswith(("MAX_JOBS=", "PIP_REPORT=")) for entry in env)
        look = "python3 -c 'import inplay; print(inplay.WHO, inplay.__file__)'"
        loud, report, package_name, base_count, certificate_count, leftover_count = inside(
            TAG,
            "cat /workspace/loud.txt",
            "wc -c < /opt/report.json",
            "python3 -c 'import imgkit_test_one as one; print(one.NAME)'",
            "grep -c BEGIN /etc/ssl/certs/imgkit-machine.crt",
            "grep -c BEGIN /etc/ssl/certs/ca-certificates.crt",
            "ls -A /workspace/mine /opt/imgkit | grep -c -e '^code' -e '^project' || true",
        )
        assert (loud, package_name, leftover_count) == ("HELLO", "imgkit-test-one", "0")
        assert int(report) > 100
        # The base's own authorities are still trusted.
        assert int(certificate_count) > int(base_count)
        # The project is linked to the code that a run brings, and an edit of that changes no image.
        run_code = ("docker", "run", "--rm", "--volume", f"{tmp_path}:/workspace/mine", TAG, "sh", "-c", look)
        assert output(*run_code) == "one /workspace/mine/inplay.py\n"
        (tmp_path / "inplay.py").write_text("WHO = 'two'\n")
        again = imgkit_json("build", recipe(tmp_path, text), "--base", standin_notorch, "--no-test")
        assert again["id"] == built["id"]
        assert output(*run_code) == "two /workspace/mine/inplay.py\n"
    finally:
        docker("image", "rm", "--force", TAG)


def test_unknown_authority_names_the_remedy(index, standin_notorch, tmp_path):
    text = f"image:\n  base: registry.invalid/base:1{PIP.format(url=index[0])}"
    result = imgkit("build", recipe(tmp_path, text), "--base", standin_notorch, "--no-test")
    assert result.returncode == 4
    assert "CERTIFICATE_VERIFY_FAILED" in result.stderr
    assert "ca: [FILE.crt]" in result.stderr


def test_base_without_pip_names_the_package(standin_notorch, tmp_path):
    bare = f"imgkit.local/{NAME}-bare:1"
    dockerfile = f"FROM {standin_notorch}\nRUN rm -rf /usr/lib/python3/dist-packages/pip\n"
    output("docker", "build", "--tag", bare, "-", stdin=dockerfile, env={"DOCKER_BUILDKIT": "0"})
    try:
        result = imgkit(
            "build", recipe(tmp_path, "image: {base: 'registry.invalid/base:1'}"), "--base", bare, "--no-test"
        )
        assert result.returncode == 4
        assert "add apt: [python3-pip]" in result.stderr
    finally:
        docker("image", "rm", "--force", bare)


LEAKS = {
    "test $TOKEN = marker-0123456789 && test -s /run/secrets/netrc": 0,
    "exit 7": 7,
    "echo $TOKEN > /dev/shm/a": 0,
    "echo https://$TOKEN@x > /opt/b": 1,
    "echo $TOKEN > /opt/c && touch -d 2001-01-01 /opt/c": 1,
    "cp --preserve /run/secrets/netrc /opt/d": 1,
}
"""The command of a step -> its exit code."""


def test_step_that_keeps_a_secret_fails(standin_notorch, tmp_path):
    (tmp_path / "github").write_text("marker-0123456789")
    (tmp_path / "netrc").write_text("machine example.org\npassword marker-of-a-file\nlogin me\n")
    script = ROOT / "recipes/imgkit_recipes/templates/with-secrets.sh"
    mounts = ["--volume", f"{tmp_path}:/run/secrets:ro", "--volume", f"{script}:/with:ro"]
    steps = [f"sh /with github=TOKEN netrc -- sh -c '{command}'" for command in LEAKS]
    rows = "; ".join(
        f'{step} 2>&1; echo "end $?"; rm -f /opt/?' for step in [*steps, "sh /with absent -- true"]
    )
    text = output("docker", "run", "--rm", *mounts, "--entrypoint", "sh", standin_notorch, "-c", rows)
    assert [int(code) for code in re.findall(r"^end (\d+)$", text, re.MULTILINE)] == [*LEAKS.values(), 1]
    assert re.findall(r"^/.*$", text, re.MULTILINE) == ["/opt/b", "/opt/c", "/opt/d"]
    assert "imgkit: this step wrote the secret netrc, which would be in the image, into:\n/opt/d\n" in text
    assert "imgkit: the builder gave no secret absent" in text
    assert "marker" not in text
