"""Environment variables: decide which a replay restores, which it takes from its machine, and which are secret.

Three classes, decided by name and, for credentials, also by value:

- *secret*: credentials. Their values are never stored; a run only records that it has read the variable.
- *today*: paths of software and folders on this machine, and the session of this user. A replay uses the current
  values, and reports the variables whose values differ from the run.
- *restored*: all other variables. A replay starts with the value that the run started with.

>>> class_of("HF_TOKEN"), class_of("PATH"), class_of("SEED")
(<VariableClass.SECRET: 'secret'>, <VariableClass.TODAY: 'today'>, <VariableClass.RESTORED: 'restored'>)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class VariableClass(StrEnum):
    """How a replay treats an environment variable; the module docstring describes each class."""

    RESTORED = "restored"
    TODAY = "today"
    SECRET = "secret"  # noqa: S105 - the name of a class


SECRET_WORDS = frozenset(
    {
        *("TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASS", "PASSPHRASE"),
        *("KEY", "KEYS", "APIKEY", "CREDENTIAL", "CREDENTIALS", "CREDS", "AUTH", "AUTHORIZATION"),
        *("COOKIE", "COOKIES", "BEARER", "JWT", "DSN", "SAS", "NETRC", "PWD", "PIN", "OAUTH"),
    }
)
"""A variable is secret if its name contains one of these words: `WANDB_API_KEY`, `authToken`."""
_SECRET_ENDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "CREDENTIALS")
"""A variable is also secret if its name ends with one of these words, without a separator: `GITHUBTOKEN`."""
_SECRET_PHRASES = ("CONNECTION_STRING", "CONN_STR")
SECRET_VALUE = re.compile(
    r"""
      (?<![A-Za-z0-9]) (?:
        gh[opusr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,}
      | hf_[A-Za-z0-9]{20,} | (?:sk|pk|rk)[-_][A-Za-z0-9_-]{20,} | xox[abeoprs]-[A-Za-z0-9-]{10,}
      | A(?:KIA|SIA)[0-9A-Z]{16} | AIza[0-9A-Za-z_-]{30,} | ya29\.[0-9A-Za-z_-]{20,}
      | npm_[A-Za-z0-9]{30,} | pypi-[A-Za-z0-9_-]{30,} | dop_v1_[0-9a-f]{40,}
      | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+
      )
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | \b(?:Bearer|Basic)\ +[A-Za-z0-9._~+/=-]{8,}
    | [A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@
    """,
    re.VERBOSE,
)
"""Matches values that are credentials, no matter what the variable is called: tokens of known services, private keys,
URLs with a password.
"""

SESSION = frozenset(
    {
        *("_", "PWD", "OLDPWD", "SHLVL", "SHELL", "TERM", "COLORTERM", "COLUMNS", "LINES", "TTY"),
        *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "DESKTOP_SESSION", "LS_COLORS"),
        *("EDITOR", "VISUAL", "PAGER", "LESS", "LESSOPEN", "LESSCLOSE", "MAIL", "PS1", "PS2"),
        *("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "HISTFILE", "HISTSIZE"),
        *("INVOCATION_ID", "JOURNAL_STREAM", "GPG_TTY", "MOTD_SHOWN", "DEBUGINFOD_URLS", "STY"),
        *("PYCHARM_HOSTED", "PROMPT_COMMAND", "WSLENV"),
        "PYTHONUNBUFFERED",
        *("GLIBC_TUNABLES", "PYTHONHASHSEED"),  # set by `rearview run`
    }
)
"""Variables of the terminal, display and login session: their values are never stored, and never reported as
different."""
SESSION_PREFIXES = (
    *("REARVIEW_", "TERM_", "SSH_", "DBUS_", "XDG_", "TMUX", "VSCODE_", "BASH_FUNC_", "WSL_"),
    *("VTE_", "KITTY_", "ITERM_", "GNOME_", "KDE_", "MALLOC_"),
    *("COV_CORE_", "COVERAGE_", "PYTEST_", "JPY_"),
)

MACHINE = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH"),
        *("CPLUS_INCLUDE_PATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH", "MANPATH", "INFOPATH"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "PYTHONPYCACHEPREFIX"),
        *("PYTHONEXECUTABLE", "PYTHONBREAKPOINT"),
        *("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PIPENV_ACTIVE", "POETRY_ACTIVE", "NODE_PATH"),
        *("HOME", "USER", "LOGNAME", "USERNAME", "USERPROFILE", "HOSTNAME", "HOST", "UID"),
        *("HOSTTYPE", "MACHTYPE", "OSTYPE", "MODULEPATH", "LOADEDMODULES", "_LMFILES_"),
        *("TMPDIR", "TEMP", "TMP", "TEMPDIR", "SCRATCH", "_CONDOR_SCRATCH_DIR"),
        *(
            "CUDA_HOME",
            "CUDA_PATH",
            "CUDA_ROOT",
            "CUDNN_PATH",
            "ROCM_HOME",
            "ROCM_PATH",
            "JAVA_HOME",
        ),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
        *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_EDITOR", "GIT_PAGER", "GIT_PREFIX"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
"""Variables that name software, folders, devices and the user of this machine. A replay uses their current values, and
reports a variable if the program read it and its value differs from the run.
"""
MACHINE_PREFIXES = ("DYLD_", "CONDA", "_CE_", "_CONDOR_", "PYENV_", "UV_", "PIP_", "LMOD_", "RAY_")
MACHINE_ENDS = ("_TMPDIR", "_TMP_DIR", "_TEMP_DIR", "_SCRATCH_DIR")

JOB_NAMES = frozenset(
    {
        *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE"),
        *("NUM_NODES", "NNODES", "JOB_ID", "ARRAY_TASK_ID", "SGE_TASK_ID"),
    }
)
JOB_PREFIXES = (
    *("SLURM_", "SLURMD_", "PBS_", "LSB_", "LSF_", "SGE_", "COBALT_", "FLUX_", "JSM_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "TORCHELASTIC_"),
)
"""Beginnings of names of variables that tell a process which batch job it belongs to, and which of the job's processes
it is. A replay restores these variables; a run that is resumed inside a batch job keeps the values of its new job.
"""

LIBRARY_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "GOTO_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NVTE_", "TRITON_", "NCCL_", "GLOO_", "UCX_"),
    *("HIP_", "HSA_", "ROCR_", "MIOPEN_", "ROCBLAS_", "HABANA_", "NEURON_", "ONEDNN_", "DNNL_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "ATEN_", "C10_", "PJRT_", "TPU_"),
    *("TF_", "XLA_", "JAX_", "KERAS_", "LIGHTNING_", "PL_", "ACCELERATE_", "DEEPSPEED_", "DS_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "TOKENIZERS_", "DIFFUSERS_", "BNB_"),
    *("NUMBA_", "NUMPY_", "NPY_", "SKLEARN_", "SCIPY_", "JOBLIB_", "LOKY_", "ARROW_", "POLARS_"),
    *("DUCKDB_", "HDF5_", "OPENCV_", "TBB_", "MXNET_", "DGL_", "TVM_", "XGBOOST_"),
    *("WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "CLEARML_", "PYTHON", "LC_", *JOB_PREFIXES),
)
LIBRARY_NAMES = frozenset({"LANG", "LANGUAGE", "TZ", "SOURCE_DATE_EPOCH", *JOB_NAMES})
"""Variables that libraries read in C, which Rearview cannot observe: each run counts as having read all of them."""

SET_IN_REPLAYS = frozenset(
    {"WANDB_SILENT", "MLFLOW_TRACKING_URI", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"}
)
"""Variables that a replay sets so that experiment trackers (W&B, MLflow) print nothing and send nothing to a server."""
_LONG = 60
"""Values with more characters than this are not shown in messages."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def is_secret_name(name: str) -> bool:
    """Return True if a variable, option or setting of this name holds a credential.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "--api-key", "dbPassword", "GITHUBTOKEN")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "MONKEY")]
    [False, False, False]
    """
    if name in {"PWD", "OLDPWD"}:
        return False
    upper = name.upper().replace("-", "_")
    words = {word.upper() for word in _WORD.findall(name)}
    return (
        not SECRET_WORDS.isdisjoint(words)
        or upper.endswith(_SECRET_ENDS)
        or any(phrase in upper for phrase in _SECRET_PHRASES)
    )


def is_secret_value(value: str) -> bool:
    """Return True if a text contains a string that can only be a credential.

    >>> is_secret_value("postgres://me:hunter2@db/runs"), is_secret_value("https://db/runs")
    (True, False)
    """
    return SECRET_VALUE.search(value) is not None


def class_of(name: str, value: str | None = None) -> VariableClass:
    """Return the class of an environment variable; if `value` is None, its name alone decides."""
    if is_of_session(name):
        return VariableClass.TODAY
    if is_secret_name(name) or (value is not None and is_secret_value(value)):
        return VariableClass.SECRET
    upper = name.upper()  # `HTTP_PROXY` and `http_proxy` are both usual
    if upper in MACHINE or upper.startswith(MACHINE_PREFIXES) or upper.endswith(MACHINE_ENDS):
        return VariableClass.TODAY
    return VariableClass.RESTORED


def is_restored(name: str) -> bool:
    """Return True if a replay sets the environment variable `name` to the value that it had in the run."""
    return class_of(name) is VariableClass.RESTORED


def is_of_session(name: str) -> bool:
    """Return True if an environment variable belongs to the terminal, the login session or Rearview itself."""
    return name in SESSION or name.startswith(SESSION_PREFIXES)


def is_of_job(name: str) -> bool:
    """Return True if a variable tells a process its batch job, or which of the job's processes it is."""
    return name in JOB_NAMES or name.startswith(JOB_PREFIXES)


def is_read_by_libraries(name: str) -> bool:
    """Return True if libraries read an environment variable in C, or while they are imported.

    >>> is_read_by_libraries("OMP_NUM_THREADS"), is_read_by_libraries("DATA_DIR")
    (True, False)
    """
    return name in LIBRARY_NAMES or name.startswith(LIBRARY_PREFIXES)


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that a run read, with their values at its start."""

    values: Mapping[str, str | None] = field(default_factory=dict)
    """Variable name -> value, or None if the variable was not set."""
    secrets: Mapping[str, bool] = field(default_factory=dict)
    """Name of a credential that the run read -> whether the variable was set."""
    whole: bool = False
    """Whether the run read the whole environment: copied it, or started a process that inherits it."""

    def restored(self, current: Mapping[str, str], *, resumes: bool = False) -> dict[str, str]:
        """Return the environment for a replay (with `resumes`: for a resumed run), made from the environment `current`.

        >>> then = Environment({"SEED": "7", "DEBUG": None})
        >>> then.restored({"SEED": "1", "DEBUG": "1", "HOME": "/root"})
        {'SEED': '7', 'HOME': '/root'}
        """
        environment = dict(current)
        for name in {*self.values, *self.secrets, *current}:
            if self._keeps_current_value(name, current, resumes=resumes):
                continue
            value = self.values.get(name)
            if value is not None:
                environment[name] = value
            elif self._was_unset(name):
                environment.pop(name, None)
        return environment

    def differences(self, current: Mapping[str, str], *, resumes: bool = False) -> list[str]:
        """Return a phrase for each variable that the run read and that `restored` would not give its recorded value.

        >>> Environment({"HOME": "/root"}, {"HF_TOKEN": True}).differences({"HOME": "/home/me"})
        ['HOME was /root, is /home/me', 'HF_TOKEN was set and its value is not stored']
        """
        restored_values = self.restored(current, resumes=resumes)
        phrases = [
            _phrase(name, value, restored_values.get(name))
            for name, value in sorted(self.values.items())
            if restored_values.get(name) != value and not is_of_session(name)
        ]
        for name, was_set in sorted(self.secrets.items()):
            if was_set and name not in restored_values:
                phrases.append(f"{name} was set and its value is not stored")
        return phrases

    def _keeps_current_value(self, name: str, current: Mapping[str, str], *, resumes: bool) -> bool:
        """Return True if a variable keeps its current value in a replay, or with `resumes` in a resumed run."""
        if class_of(name) is VariableClass.TODAY:
            return True
        return (
            resumes and is_of_job(name) and any(is_of_job(current_name) for current_name in current)
        )

    def _was_unset(self, name: str) -> bool:
        if name in self.values:
            return self.values[name] is None
        if name in self.secrets:
            return not self.secrets[name]
        return (self.whole or is_read_by_libraries(name)) and class_of(
            name
        ) is VariableClass.RESTORED


def _phrase(name: str, recorded: str | None, current: str | None) -> str:
    texts = ["not set" if value is None else value for value in (recorded, current)]
    if any(len(text) > _LONG for text in texts):
        return f"{name} has changed"
    return f"{name} was {texts[0]}, is {texts[1]}"
