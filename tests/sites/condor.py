"""A real HTCondor on loopback: Debian 13 in a folder, entered with chroot, in its own namespaces."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

from limits import HUNG
from servers.daemons import UnavailableError, free_port

ROOT = Path(os.environ.get("REARVIEW_SITES", "/var/tmp/rearview-sites")) / "trixie"

# mounts and processes are gone when this is; /jobs and /rearview are the tests' own
START = """
set -e
root=$1 source=$2 jobs=$3
mount --bind "$source" "$root/rearview"
mount --bind "$jobs" "$root/jobs"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/run"
for folder in lib log; do
  mount -t tmpfs tmpfs "$root/var/$folder/condor"
done
mkdir -p "$root/run/condor" "$root/run/lock/condor" "$root/var/lib/condor/spool" "$root/var/lib/condor/execute"
chroot "$root" chown -R condor: /run/condor /run/lock/condor /var/lib/condor /var/log/condor
chmod 1777 "$root/tmp"
chroot "$root" condor_master -f &
wait
"""

SETTINGS = {
    "ENABLE_IPV6": "False",
    "MOUNT_UNDER_SCRATCH": "",
    "MOUNT_PRIVATE_DEV_SHM": "False",
    "NUM_CPUS": "2",
    "MEMORY": "2048",
    "NEGOTIATOR_INTERVAL": "1",
    "NEGOTIATOR_CYCLE_DELAY": "1",
    "NEGOTIATOR_MIN_INTERVAL": "1",
    "SCHEDD_INTERVAL": "2",
    "SCHEDD_MIN_INTERVAL": "1",
    "STARTER_UPDATE_INTERVAL": "2",
    "CLAIM_WORKLIFE": "0",
    "JOB_START_DELAY": "0",
    "MAXJOBRETIREMENTTIME": "0",
}


class Condor:
    def __init__(self, jobs):
        self.jobs = jobs
        port = free_port()
        settings = {
            **SETTINGS,
            "SHARED_PORT_PORT": str(port),
            "COLLECTOR_HOST": f"127.0.0.1:{port}",
        }
        self.env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp"}
        self.env |= {f"_CONDOR_{name}": value for name, value in settings.items()}
        self.inside = None

    def run(self, *command, user="tester", check=True, folder="/jobs"):
        """Run a command inside, as `user`."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.inside), "-m", "-p", "--", "chroot", f"--userspec={user}",
             str(ROOT), "sh", "-c", 'cd "$0" && exec "$@"', folder, *map(str, command)],
            env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{command}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def log(self, name):
        return self.run("tail", "-n", "40", f"/var/log/condor/{name}", user="root", check=False)


@contextlib.contextmanager
def condor(source, jobs):
    if os.getuid() != 0 or not (ROOT / "complete").exists():
        raise UnavailableError(f"no HTCondor in {ROOT}; run tests/sites/install as root")
    jobs.chmod(0o777)
    site = Condor(jobs)
    log = jobs / "master.out"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["unshare", "-m", "-p", "-f", "--kill-child", "--propagation", "private",
             "sh", "-c", START, "sh", str(ROOT), str(source), str(jobs)],
            env=site.env, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + HUNG
        while True:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if children:
                site.inside = int(children[0])
                state = site.run("condor_status", "-af", "Name", check=False)
                if "slot1" in state:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                master = site.log("MasterLog") + site.log("StartLog") if site.inside else ""
                raise UnavailableError(f"HTCondor did not start: {log.read_text()}{master}")
            time.sleep(0.5)
        yield site
    finally:
        process.kill()
        process.wait()
