import pytest

from rearview.errors import UsageError
from rearview.remote.folder import FolderRemote
from rearview.remote.fsspec import FsspecRemote
from rearview.remote.htcondor_folder import CondorRemote, JobAd
from rearview.remote.open import open_remote
from rearview.remote.user_copy_function import FunctionRemote
from rearview.remote.xrootd import XrootdRemote


@pytest.mark.parametrize(
    ("target", "mode", "kind"),
    [
        ("/data/x", None, FolderRemote),
        ("relative path", "shared", FolderRemote),
        ("file:///data/x", None, FolderRemote),
        ("s3://bucket/x", None, FsspecRemote),
        ("sftp://host/x", None, FsspecRemote),
        ("webdav+https://host/x", None, FsspecRemote),
        ("root://host:1094//pnfs/x", None, XrootdRemote),
        (print, None, FunctionRemote),
    ],
)
def test_the_target_decides_the_kind_of_remote(target, mode, kind):
    assert isinstance(open_remote(target, mode), kind)


def test_an_object_with_the_five_methods_is_used_as_it_is(tmp_path):
    mine = FolderRemote(tmp_path)
    assert open_remote(mine) is mine


@pytest.mark.parametrize(("target", "mode"), [(None, None), ("x", "ftp"), (None, "manual")])
def test_a_text_that_names_no_remote_is_refused_with_the_choices(target, mode):
    with pytest.raises(UsageError):
        open_remote(target, mode)


def test_outside_htcondor_its_transfer_is_refused(monkeypatch):
    monkeypatch.delenv("_CONDOR_JOB_AD", raising=False)
    with pytest.raises(UsageError, match="not an HTCondor job"):
        open_remote("htcondor:")


AD = """Args = "--name=a = b"
CheckpointExitCode = 77
TransferCheckpoint = "model.pt, rearview/"
JobMaxVacateTime = 120
"""


@pytest.fixture
def env(tmp_path):
    (tmp_path / "ad").write_text(AD)
    return {"_CONDOR_SCRATCH_DIR": str(tmp_path), "_CONDOR_JOB_AD": str(tmp_path / "ad")}


def test_the_job_says_its_code_its_files_and_its_grace(env, tmp_path):
    ad = JobAd.read(env)
    assert (ad.exit_code, ad.files, ad.grace) == (77, ("model.pt", "rearview"), 120.0)
    assert ad.covers(tmp_path / "model.pt")
    assert ad.covers(tmp_path / "rearview" / "a" / "b")
    assert not ad.covers(tmp_path / "other")
    assert not ad.covers(tmp_path.parent / "model.pt")


def test_a_file_that_htcondor_would_not_carry_is_refused_with_the_line_to_write(env, tmp_path):
    remote = CondorRemote("elsewhere", env=env)
    with pytest.raises(UsageError, match=r"transfer_checkpoint_files = model\.pt, rearview, elsew"):
        remote.put(tmp_path / "ad", "a")
