"""Real servers on loopback for the tests: S3, WebDAV and XRootD."""

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE = 1200.0


class UnavailableError(Exception):
    """The server cannot be had on this machine."""


@dataclass(frozen=True)
class Server:
    url: str
    options: dict
    folder: Path | None = None
    process: subprocess.Popen | None = None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def need(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(f"{', '.join(missing)} not installed; run tests/servers/install")


@contextlib.contextmanager
def running(command, port, log, **options):
    """Start a server, wait until it answers on `port`, stop it at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, **options)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"{command[0]} did not start: {log.read_text()[-800:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def s3_server():
    need("moto", "flask", "s3fs")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server"]
        command += ["-H", "127.0.0.1", "-p", str(port)]
        with running(command, port, Path(folder, "log")) as process:
            endpoint = f"http://127.0.0.1:{port}"
            options = {"key": "test", "secret": "test", "endpoint_url": endpoint}
            request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=10).close()
            yield Server("s3://bucket/runs", options, process=process)


@contextlib.contextmanager
def webdav_server():
    need("wsgidav", "cheroot", "webdav4")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "data")
        root.mkdir()
        command = [sys.executable, "-W", "ignore", "-m", "wsgidav.server.server_cli"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--root", str(root)]
        command += ["--auth", "anonymous", "--server", "cheroot", "--no-config"]
        with running(command, port, Path(folder, "log")) as process:
            yield Server(f"webdav+http://127.0.0.1:{port}/", {}, root, process)


@contextlib.contextmanager
def xrootd_server():
    need("XRootD")
    program = shutil.which("xrootd")
    if program is None:
        raise UnavailableError("xrootd is not installed; run tests/servers/install")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for name in ("data", "admin", "run"):
            (base / name).mkdir()
        config = base / "xrootd.cfg"
        config.write_text(
            f"xrd.port {port}\nxrd.allow host localhost\noss.localroot {base}/data\n"
            f"all.export /\nall.adminpath {base}/admin\nall.pidpath {base}/run\n"
            "xrootd.chksum max 2 adler32\n"
        )
        options = {"cwd": base / "admin", "env": {**os.environ, **loopback_only(base)}}
        if os.getuid() == 0:  # xrootd refuses to run as root
            user = next((name for name in ("xrootd", "nobody") if known_user(name)), None)
            if user is None:
                raise UnavailableError("xrootd needs a user other than root to run as")
            options |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
            base.chmod(0o755)
            for path in (base / "data", base / "admin", base / "run"):
                shutil.chown(path, user)
        command = [program, "-I", "v4", "-c", str(config)]
        with running(command, port, base / "log", **options) as process:
            yield Server(f"root://127.0.0.1:{port}//runs", {}, base / "data", process)


@contextlib.contextmanager
def sftp_server():
    need("paramiko")
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    keygen = shutil.which("ssh-keygen")
    if program is None or keygen is None:
        raise UnavailableError("sshd is not installed; run tests/servers/install")
    port, user = free_port(), pwd.getpwuid(os.getuid()).pw_name
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "data").mkdir()
        for name in ("host", "user"):
            subprocess.run(
                [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(base / name)], check=True
            )
        config = base / "sshd_config"
        config.write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {base}/host\nPidFile {base}/pid\n"
            f"AuthorizedKeysFile {base}/user.pub\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n"
        )
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, though it is not used here
        command = [program, "-D", "-e", "-f", str(config)]
        with running(command, port, base / "log") as process:
            options = {"username": user, "key_filename": str(base / "user"), "port": port}
            options |= {"look_for_keys": False, "allow_agent": False}
            yield Server(f"sftp://127.0.0.1{base}/data", options, base / "data", process)


def known_user(name):
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def loopback_only(folder):
    compiler = shutil.which("cc")
    if compiler is None:
        return {}  # xrd.allow still turns other hosts away
    shim = folder / "loopback.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(shim), str(HERE / "loopback.c"), "-ldl"],
        capture_output=True,
        check=False,
    )
    return {"LD_PRELOAD": str(shim)} if done.returncode == 0 else {}


SERVERS = {"s3": s3_server, "webdav": webdav_server, "xrootd": xrootd_server, "sftp": sftp_server}
