"""``imgkit job``, ``submit``, ``status``, ``logs``, ``cancel``: an image on N nodes."""

from __future__ import annotations

import enum
import inspect
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from imgkit_builder.job.request import Job, Overlay, Request, Script

SCHEMA = 1


class RunBy(str, enum.Enum):
    """What starts the container."""

    SINGULARITY = "singularity"
    DOCKER = "docker"
    HOST = "host"


class PbsStart(str, enum.Enum):
    """What starts one process a node in a PBS job."""

    PALS = "pals"
    PBSDSH = "pbsdsh"
    SSH = "ssh"


class Format(str, enum.Enum):
    """Of jobs for Kubernetes."""

    RUNAI = "runai"
    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"


def _request(
    command: list[str] = typer.Argument(None, metavar="-- COMMAND...", help="dist-... and its arguments."),
    nodes: str = typer.Option(
        "", metavar="N|MIN:MAX", help="Nodes (without it 1, or all --hosts); MIN:MAX may vary."
    ),
    gpus: int | None = typer.Option(None, metavar="G", help="GPUs of each node; without it all."),
    cpus: int | None = typer.Option(None, metavar="C", help="CPUs of each node."),
    nproc: int | None = typer.Option(None, metavar="N", help="Processes a node, where not one a GPU."),
    time: str = typer.Option("", metavar="HH:MM:SS", help="Time limit; 90m and 2h are right as well."),
    account: str = typer.Option("", "--account", "-A", help="Account or project that pays."),
    queue: str = typer.Option("", "--queue", "-q", help="Queue, partition, or RunAI's project."),
    qos: str = typer.Option("", help="Slurm's quality of service."),
    image: str = typer.Option("", metavar="PATH|REF", help="Without it RECIPE.sif here, or RECIPE:latest."),
    delta: Path | None = typer.Option(
        None, metavar="X.imgdelta", help="Lay it over the .sif, which stays as it is (imgkit delta)."
    ),
    bind: list[str] = typer.Option([], metavar="/SRC[:/DEST[:ro]]", help="Mount into the container."),
    env: list[str] = typer.Option([], metavar="NAME=VALUE", help="Variable for the program."),
    name: str = typer.Option("", help="Of the job; without it the recipe's."),
    option: list[str] = typer.Option([], metavar="WORD", help="Further option for the scheduler."),
    directory: Path = typer.Option(Path(), metavar="DIR", help="Where the job runs; without it here."),
    stop_before: int | None = typer.Option(
        None,
        metavar="SECONDS",
        help="Ask the program to save so long before the time limit (Slurm); 0 never.",
    ),
    interactive: bool = typer.Option(False, "--interactive", "-i", help="Nodes for work by hand."),
    sif: Path | None = typer.Option(None, metavar="ARCHIVE", help="A job that converts ARCHIVE to a .sif."),
    runtime: RunBy | None = typer.Option(None, help="host: the program is installed on the nodes."),
    pbs_start: PbsStart = typer.Option(PbsStart.PALS, help="PBS: what starts one process a node."),
    kind: Format = typer.Option(Format.RUNAI, "--format", help="Kubernetes: what is written."),
    pvc: list[str] = typer.Option([], metavar="CLAIM:/PATH", help="Kubernetes: volume of the pods."),
    hosts: str = typer.Option("", metavar="A,B", help="MPI, ssh: the nodes, the head first."),
    hostfile: Path | None = typer.Option(None, metavar="FILE", help="The same, one host a line."),
    direct: bool = typer.Option(False, "--direct", help="MPI: mpirun starts every rank, without torchrun."),
    ssh: bool = typer.Option(False, "--ssh", help="Hosts by ssh, without mpirun."),
    templates: Path | None = typer.Option(None, metavar="DIR", help="Folder of templates of your own."),
    strict: bool = typer.Option(False, "--strict", help="Warnings are errors."),
) -> Request:
    """The request that the flags make up; its signature is that of both verbs."""
    from imgkit_builder.job.request import Request
    from imgkit_builder.job.ssh import hostlist

    return Request(
        command=tuple(command or ()),
        nodes=nodes,
        gpus=gpus,
        cpus=cpus,
        nproc=nproc,
        time=time,
        account=account,
        queue=queue,
        qos=qos,
        image=image,
        overlay=_overlay(delta, directory) if delta else None,
        name=name,
        binds=tuple(bind),
        env=tuple(env),
        options=tuple(option),
        directory=directory,
        stop_before_s=stop_before,
        interactive=interactive,
        archive=sif,
        runtime=runtime.value if runtime else None,
        pbs_start=pbs_start.value,
        format=kind.value,
        pvcs=tuple(pvc),
        hosts=hostlist.read(hosts, hostfile),
        direct=direct,
        ssh=ssh,
        templates=templates,
        strict=strict,
    )


def _overlay(path: Path, directory: Path) -> Overlay:
    """The delta `path`, read here, or where the job runs."""
    from imgkit_builder.delta import descriptor
    from imgkit_builder.job.request import Overlay

    return Overlay(path=path, delta=descriptor.read(path if path.exists() else directory / path))


def _with_request(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with the flags of `_request` between its own, which it gets as one ``request``."""
    shared = inspect.signature(_request).parameters
    own = inspect.signature(verb).parameters

    def called(**given: Any) -> None:
        request = _request(**{flag: given.pop(flag) for flag in shared})
        verb(request=request, **given)

    recipe, *rest = (parameter for flag, parameter in own.items() if flag != "request")
    together = (recipe, *shared.values(), *rest)
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in together]
    )
    called.__annotations__ = {**_request.__annotations__, **verb.__annotations__}
    called.__doc__ = verb.__doc__
    return called


@_with_request
def verb_job(
    recipe: str = typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a file."),
    request: Any = None,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Print exactly what would be submitted to run COMMAND on N nodes.

    Values come from the recipe's system section, flags override them. What the
    system is known not to do is an error here, before anything waits in a queue.

    \b
    Examples:
      imgkit job mn5 --nodes 2 -A bsc98 --qos acc_debug --time 10m -- dist-bench
      imgkit job mn5 -A bsc98 --qos acc_debug --time 1h --interactive
      imgkit job mn5 -A bsc98 --qos gp_debug --time 1h --sif mn5.tar
      imgkit job rcp --nodes 4 --image registry.example.org/me/rcp:1 -- dist-train --steps 1000
      imgkit job olivia-eap --nodes 2 --time 30m --pbs-start pbsdsh -- dist-hello
      imgkit job lambda --hosts 10.0.0.1,10.0.0.2 -- dist-hello
      imgkit job lambda --hosts 10.0.0.1,10.0.0.2 --ssh -- dist-hello
    """
    _show(*_made(recipe, request), as_json=as_json)


@_with_request
def verb_submit(
    recipe: str = typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or a file."),
    request: Any = None,
    dry_run: bool = typer.Option(False, "--dry-run", help="Only print it: imgkit job."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Submit what ``imgkit job`` prints, and print the job's id.

    Where there is no scheduler the run takes place here, and its exit code is
    this command's.

    \b
    Examples:
      imgkit submit mn5 --nodes 2 -A bsc98 --qos acc_debug --time 10m -- dist-pi
      imgkit submit cpu --nproc 2 -- dist-train --steps 100
      imgkit submit lambda --hosts node1,node2 --ssh -- dist-bench
    """
    from imgkit_builder.base import process
    from imgkit_builder.job import check, submit

    job, script = _made(recipe, request)
    if dry_run:
        _show(job, script, as_json=as_json)
        return
    check.before_submission(job)
    if script.remote:
        raise typer.Exit(_fanned_out(script))
    if script.foreground:
        print(f"imgkit: {shlex.join(script.submit)}", file=sys.stderr)
        process.become(script.submit, cwd=job.directory)
    record = submit.submit(job, script)
    # Said before anything else can fail: the job is there.
    print(
        json.dumps({**_described(job, script), "id": record.id}, indent=2) if as_json else record.id,
        flush=True,
    )
    submit.keep(record)
    if as_json:
        return
    if job.request.interactive:
        # How to get in: these lines come before the command in what `imgkit job` prints.
        comments = [text for text in script.text.splitlines() if text.startswith("#")]
        print("\n".join(comments), file=sys.stderr)
    print(
        f"imgkit: imgkit status {record.id}; imgkit logs {record.id}; imgkit cancel {record.id}",
        file=sys.stderr,
    )


def _fanned_out(script: Script) -> int:
    """Run the lines of all hosts; what they say bears the host's name."""
    from imgkit_builder.base import process
    from imgkit_builder.job.ssh import fanout

    process.need("ssh", "apt-get install openssh-client")

    def show(host: str, text: bytes, error: bool) -> None:
        stream = sys.stderr.buffer if error else sys.stdout.buffer
        stream.write(f"{host}: ".encode() + text + b"\n")
        stream.flush()

    return fanout.run(script.remote, show=show, say=lambda text: print(f"imgkit: {text}", file=sys.stderr))


def verb_status(
    job_id: str = typer.Argument("", metavar="[ID]", help="Without it: the queues of this system."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show a job, with its expected start while it waits; without ID the queues.

    \b
    Examples:
      imgkit status 4711
      imgkit status
    """
    import shutil

    from imgkit_builder.job import submit, systems
    from imgkit_entrypoints.errors import ToolMissing

    if job_id:
        record = submit.record_of(job_id)
        _thin(systems.named(record.system).status(record), as_json=as_json)
        return
    known = [words for name in ("slurm", "pbs", "runai") for words in systems.named(name).queues()]
    for words in known:
        if shutil.which(words[0]):
            _thin(words, as_json=as_json)
            return
    raise ToolMissing(f"none of {', '.join(words[0] for words in known)} is on PATH", hint="imgkit status ID")


def verb_logs(
    job_id: str = typer.Argument(metavar="ID"),
    as_json: bool = typer.Option(False, "--json", help="Print the command as a JSON object, run nothing."),
) -> None:
    """Follow a job's output; Ctrl-C ends the following, not the job.

    \b
    Examples:
      imgkit logs 4711
    """
    from imgkit_builder.job import submit, systems

    record = submit.record_of(job_id)
    words = systems.named(record.system).logs(record)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "id": record.id, "command": words}, indent=2))
        return
    _thin(words, as_json=False)


def verb_cancel(
    job_id: str = typer.Argument(metavar="ID"),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """End a job.

    \b
    Examples:
      imgkit cancel 4711
    """
    from imgkit_builder.job import submit, systems

    record = submit.record_of(job_id)
    _thin(systems.named(record.system).cancel(record), as_json=as_json)


def _made(recipe: str, request: Request) -> tuple[Job, Script]:
    from imgkit_builder.job import systems
    from imgkit_builder.job.resolve import resolve
    from imgkit_builder.recipe.load import load

    job = resolve(load(recipe), request)
    for warning in job.warnings:
        print(f"imgkit: {warning}", file=sys.stderr)
    return job, systems.named(systems.name_for(job)).script(job)


def _show(job: Job, script: Script, *, as_json: bool) -> None:
    print(json.dumps(_described(job, script), indent=2) if as_json else script.text, end="\n" * as_json)


def _described(job: Job, script: Script) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "recipe": job.recipe.name,
        "scheduler": job.recipe.system.scheduler,
        "name": job.name,
        "nodes": [job.min_nodes, job.nodes],
        "gpus": job.gpus,
        "cpus": job.cpus,
        "time": job.time,
        "image": job.image,
        "submit": list(script.submit),
        "script": script.text,
        "warnings": list(job.warnings),
    }


def _thin(words: tuple[str, ...], *, as_json: bool) -> None:
    """Print the command, run it, and leave with its exit code."""
    from imgkit_builder.base import process

    if as_json:
        done = process.run(words, check=False)
        data = {"schema": SCHEMA, "command": words, "exit_code": done.returncode, "output": done.output}
        print(json.dumps(data, indent=2))
        raise typer.Exit(done.returncode)
    print(f"imgkit: {shlex.join(words)}", file=sys.stderr)
    raise typer.Exit(process.attached(words))
