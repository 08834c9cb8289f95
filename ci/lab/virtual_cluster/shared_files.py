"""The files that all nodes share: those of Slurm, munge and ssh, and the stand-ins for GPUs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from virtual_cluster.programs import run_tool
from virtual_cluster.state import LOGIN, NETWORK, ClusterConfig, SlurmConfig

NOBODY = 65534
NULL_DEVICE = os.makedev(1, 3)


def write_shared_files(config: ClusterConfig) -> None:
    """Write all files into the cluster's folder, and make the home folder of its user."""
    for name in ("etc", "log", "slurm", "gpu", "home"):
        (config.state / name).mkdir()
    home = config.state / "home" / config.user
    home.mkdir()
    os.chown(home, config.uid, config.uid)
    if config.has_ssh:
        _write_ssh_files(config.state)
    if config.slurm:
        _write_slurm_files(config, config.slurm)


def _write_ssh_files(state: Path) -> None:
    """Make one key for all users and one for all hosts, and the configuration of ssh and sshd."""
    etc = state / "etc"
    for name, comment in (("id", "cluster"), ("hostkey", "host")):
        run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", etc / name)
    # ssh refuses a private key that others can read only when the caller owns it; owned by a third party, one
    # file serves root and the user.
    os.chown(etc / "id", NOBODY, NOBODY)
    (etc / "id").chmod(0o644)
    (etc / "sshd_config").write_text(format_sshd_config(etc))
    (etc / "ssh_config").write_text(format_ssh_config(etc))


def format_sshd_config(etc: Path) -> str:
    """Return the configuration of the nodes' sshd."""
    return f"""\
HostKey {etc}/hostkey
AuthorizedKeysFile {etc}/id.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
UseDNS no
PrintMotd no
AcceptEnv *
PidFile /run/sshd.pid
MaxStartups 100
"""


def format_ssh_config(etc: Path) -> str:
    """Return the configuration of ssh on the nodes."""
    return f"""\
Host *
  IdentityFile {etc}/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  BatchMode yes
  ConnectTimeout 5
"""


def _write_slurm_files(config: ClusterConfig, slurm: SlurmConfig) -> None:
    """Write the configuration of Slurm and a key for munge, and make Slurm's folders."""
    etc = config.state / "etc"
    (etc / "munge.key").write_bytes(os.urandom(128))
    (etc / "munge.key").chmod(0o400)
    (etc / "slurm.conf").write_text(format_slurm_conf(config, slurm))
    if slurm.gpus:
        for number in range(slurm.gpus):
            os.mknod(config.state / f"gpu/nvidia{number}", 0o666 | stat.S_IFCHR, NULL_DEVICE)
        (etc / "gres.conf").write_text(format_gres_conf(config.state, slurm.gpus))
    (config.state / "slurm/ctld").mkdir(mode=0o700)
    for name in config.compute_nodes:
        (config.state / "slurm" / name).mkdir()


def format_gres_conf(state: Path, gpus: int) -> str:
    """Return Slurm's list of GPUs. Their device files are stand-ins for /dev/nvidia0 and so on."""
    return f"AutoDetect=off\nName=gpu File={state}/gpu/nvidia{number_range(0, gpus - 1)}\n"


def format_slurm_conf(config: ClusterConfig, slurm: SlurmConfig) -> str:
    """Return slurm.conf."""
    state = config.state
    last_node = config.nodes
    lines = f"""\
ClusterName=virtual
SlurmctldHost={LOGIN}({config.address(LOGIN)})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={state}/slurm/ctld
SlurmdSpoolDir={state}/slurm/%n
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd-%n.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
# No cgroups: they are the machine's, and tests need no limits.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={state}/slurm/jobcomp.txt
SelectType=select/cons_tres
# The nodes claim more processors than the machine has.
SlurmdParameters=config_overrides
MpiDefault=none
# PMIx keeps directories named by job here: a folder of each node's own.
TmpFS=/run/local
# The caller's limits may be above what this machine lets anyone set.
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout={slurm.node_timeout_s}
SlurmctldTimeout=30
MessageTimeout=10
KillWait=2
BatchStartTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,bf_interval=1
""".splitlines()
    lines += _memory_settings(slurm)
    gres = ""
    if slurm.gpus:
        lines.append("GresTypes=gpu")
        gres = f" Gres=gpu:{slurm.gpus}"
    lines.append(
        f"NodeName={config.prefix}{number_range(1, last_node)}"
        f" NodeAddr={NETWORK}{number_range(11, 10 + last_node)}"
        f" Sockets=1 CoresPerSocket={slurm.cpus} ThreadsPerCore=1 RealMemory={slurm.memory_mib}{gres}"
        " State=UNKNOWN"
    )
    for name in slurm.partitions:
        is_default = "YES" if name == slurm.partitions[0] else "NO"
        lines.append(
            f"PartitionName={name} Nodes=ALL Default={is_default} MaxTime=60 State=UP OverSubscribe=NO"
        )
    return "\n".join(lines) + "\n"


def _memory_settings(slurm: SlurmConfig) -> list[str]:
    """Return the lines of slurm.conf that decide whether a job's memory is limited."""
    if not slurm.limit_memory:
        return ["SelectTypeParameters=CR_Core", "JobAcctGatherType=jobacct_gather/none"]
    # Without cgroups, slurmstepd itself compares a step's processes with its memory, every second.
    return [
        "SelectTypeParameters=CR_Core_Memory",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=1",
        "JobAcctGatherParams=OverMemoryKill",
    ]


def number_range(first: int, last: int) -> str:
    """Return the numbers as Slurm writes them: ``[1-3]``, or ``1`` if there is only one."""
    return str(first) if first == last else f"[{first}-{last}]"
