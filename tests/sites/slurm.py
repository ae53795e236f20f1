"""A real Slurm on loopback: munge, controller and one node, all in one folder."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from servers.daemons import UnavailableError, free_port

CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=10
NodeName=node0 NodeHostname=localhost NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=node0 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder):
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command):
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def submit(self, *arguments):
        return self.run("sbatch", "--parsable", *map(str, arguments))

    def job(self, number):
        text = self.run("scontrol", "show", "job", number)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)


@contextlib.contextmanager
def slurm(folder):
    missing = [one for one in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(one)]
    if missing or os.getuid() != 0:
        raise UnavailableError(f"{missing or 'root'} needed; run tests/sites/install as root")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            folder=folder, controller=free_port(), node=free_port(), cpus=os.cpu_count() or 1
        )
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    site = Slurm(folder)
    processes = []

    def start(*command):
        with (folder / f"{command[0]}.out").open("wb") as out:
            processes.append(
                subprocess.Popen(command, env=site.env, cwd=folder, stdout=out, stderr=out)
            )

    try:
        start(
            "munged", "--foreground", "--force",
            f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        wait((folder / "munge.socket").exists, processes, folder)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "node0")
        wait(lambda: idle(site), processes, folder)
        yield site
        site.run("scancel", "--user=root")
        wait(lambda: not site.run("squeue", "-h"), processes, folder)  # no step outlives its node
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def idle(site):
    done = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], env=site.env, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == "idle"


def wait(ready, processes, folder, seconds=1200):
    deadline = time.monotonic() + seconds
    while not ready():
        if any(one.poll() is not None for one in processes) or time.monotonic() > deadline:
            logs = "".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in folder.glob("*.out"))
            raise UnavailableError(f"Slurm did not start: {logs}")
        time.sleep(0.2)


def served():
    """Yield a Slurm that runs, for a fixture; without one, skip loudly."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        context = slurm(Path(folder))
        try:
            found = context.__enter__()
        except UnavailableError as exc:
            if os.environ.get("REARVIEW_REQUIRE_SERVERS"):
                raise
            pytest.skip(f"NOT TESTED under a real Slurm: {exc}")
        yield found
        context.__exit__(None, None, None)
