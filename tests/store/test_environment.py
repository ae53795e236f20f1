"""Which variables are restored, of today, or secret, and the file that keeps them."""

import pytest

from rearview.model.program_environment_variables import Environment, VariableClass, class_of
from rearview.store.recorded_inputs import append_environment, read_environment

RULE = {
    VariableClass.RESTORED: (
        *("SEED", "DATA_DIR", "DATA_PATH", "OMP_NUM_THREADS", "HF_HOME", "XLA_FLAGS", "TZ", "LANG"),
        *("WORLD_SIZE", "RANK", "MASTER_ADDR", "SLURM_PROCID", "WANDB_MODE", "MAX_TOKENS"),
        *("TOKENIZERS_PARALLELISM", "GIT_COMMIT", "AUTHOR", "MONKEY", "CUBLAS_WORKSPACE_CONFIG"),
    ),
    VariableClass.TODAY: (
        *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "SLURM_TMPDIR", "TERM"),
        *("DISPLAY", "SSH_AUTH_SOCK", "VIRTUAL_ENV", "CONDA_PREFIX", "REARVIEW_RUN", "https_proxy"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PWD", "USER", "HOSTNAME", "XDG_RUNTIME_DIR"),
    ),
    VariableClass.SECRET: (
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PASSWORD"),
        *("DB_PASS", "PGPASSWORD", "GITHUBTOKEN", "apiKey", "GOOGLE_APPLICATION_CREDENTIALS"),
        *("BASIC_AUTH", "SENTRY_DSN", "AZURE_STORAGE_CONNECTION_STRING", "NETRC", "DB_PWD"),
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in RULE.items() for name in names]
)
def test_a_name_has_one_class(name, kind):
    assert class_of(name) is kind


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "a" * 34,
        "https://me:word@host/x",
        "-----BEGIN RSA PRIVATE KEY-----",
        "AKIA" + "A" * 16,
        "sk-" + "a1" * 16,
        "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abc",
        "Authorization: Bearer abcdefgh12",
    ],
)
def test_a_credential_is_recognised_by_its_value(value):
    assert class_of("PLAIN", value) is VariableClass.SECRET
    assert class_of("PLAIN", "https://host/x") is VariableClass.RESTORED


def test_a_variable_that_was_set_later_is_removed_if_the_run_would_have_read_it():
    now = {"KNOB": "1", "OMP_NUM_THREADS": "4", "OTHER": "x", "PATH": "/bin"}
    assert Environment().restored(now) == {"KNOB": "1", "OTHER": "x", "PATH": "/bin"}
    assert Environment(whole=True).restored(now) == {"PATH": "/bin"}
    assert Environment({"KNOB": None}).restored(now) == {"OTHER": "x", "PATH": "/bin"}


def test_a_secret_that_was_not_set_is_removed_and_one_that_was_stays_as_it_is():
    then = Environment(secrets={"A_TOKEN": False, "B_TOKEN": True})
    assert then.restored({"A_TOKEN": "1", "B_TOKEN": "2"}) == {"B_TOKEN": "2"}
    assert then.differences({}) == ["B_TOKEN was set and its value is not stored"]


def test_a_resumed_run_is_part_of_the_batch_job_that_it_is_started_in():
    then = Environment({"SLURM_JOB_ID": "1", "RANK": "0", "SEED": "7"})
    now = {"SLURM_JOB_ID": "2", "SEED": "9"}
    assert then.restored(now) == {"SLURM_JOB_ID": "1", "RANK": "0", "SEED": "7"}
    assert then.restored(now, resumes=True) == {"SLURM_JOB_ID": "2", "SEED": "7"}
    assert then.restored({}, resumes=True) == {"SLURM_JOB_ID": "1", "RANK": "0", "SEED": "7"}


def test_the_first_value_of_a_variable_holds(tmp_path):
    assert read_environment(tmp_path) is None
    append_environment(tmp_path, Environment({"A": "1", "B": None}, {"TOKEN": True}))
    append_environment(tmp_path, Environment({"A": "2"}, whole=True))
    assert read_environment(tmp_path) == Environment(
        {"A": "1", "B": None}, {"TOKEN": True}, whole=True
    )


def test_a_value_that_is_no_text_comes_back(tmp_path):
    odd = b"\xff\xfe".decode("utf-8", "surrogateescape")
    append_environment(tmp_path, Environment({"A": odd}))
    assert read_environment(tmp_path) == Environment({"A": odd})
