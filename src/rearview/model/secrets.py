"""Recognise and hide secrets in files and on command lines.

Names and values of options are judged by the rules for environment variables (`model.program_environment_variables`):

- A *file* is not part of a version if its name says that it contains credentials, or if its text contains a
  private key or the token of a known service.
- An *argument* is stored and shown as `***` if it follows an option with a secret name, or if it contains a
  credential.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rearview.model.program_environment_variables import (
    SECRET_VALUE,
    is_secret_name,
    is_secret_value,
)

HIDDEN = "***"
"""Text that is stored and shown in place of a secret."""

_FILE = re.compile(
    r"""
      \.env(\..*)? | .*\.env | \.envrc | \.netrc | _netrc | \.pypirc | \.npmrc | \.pgpass | \.my\.cnf | \.s3cfg
    | \.boto | \.htpasswd | \.git-credentials | \.dockercfg | \.dockerconfigjson | \.kaggle | kaggle\.json
    | (.*[._-])?(secret|secrets|credential|credentials|creds|password|passwords|passwd)([._-].*)?
    | (.*[._-])?(token|tokens|api[._-]?keys?|auth)(\.(txt|json|ya?ml|toml|ini|cfg|conf))?
    | .*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|ovpn|gpg|pgp|asc|keytab|tfvars|kubeconfig)
    | id_(rsa|dsa|ecdsa|ed25519)(_sk)?(\..*)? | kubeconfig(\..*)? | .*\.kubeconfig | x509up_.*
    | (.*[._-])?service[._-]?accounts?([._-].*)?\.json | client_secrets?.*\.json
    | application_default_credentials\.json | adc\.json | \.?vault[._-]?(token|pass).* | wandb_key.*
    """,
    re.VERBOSE | re.IGNORECASE,
)
_CODE = re.compile(
    r".*\.(py|pyi|pyx|ipynb|c|cc|cpp|h|cu|js|ts|rs|go|r|jl|md|rst|html|css)", re.IGNORECASE
)
"""Names of source files. These names do not count as secret, because `tokens.py` and `auth.py` are programs."""
_FOLDER = frozenset({".aws", ".ssh", ".gnupg", ".kube", ".docker", ".azure", ".gcloud", ".secrets"})
"""Folders whose files are never part of a version."""
_CONTENT = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----\s*[A-Za-z0-9+/=\r\n:, -]{32}"
    rb"|PuTTY-User-Key-File-\d"
    rb"|\"private_key\"\s*:\s*\"-----BEGIN"
    rb"|(?<![A-Za-z0-9])(gh[opusr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,}"
    rb"|glpat-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|sk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}"
    rb"|xox[abeoprs]-[0-9]+-[A-Za-z0-9-]{20,}|A(?:KIA|SIA)[0-9A-Z]{16}(?![A-Z0-9])"
    rb"|AIza[0-9A-Za-z_-]{35}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,})"
)
_OPTION = re.compile(r"(--?[^=\s]+|[^=\s/]+)=(.+)", re.DOTALL)
_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)")
_PLAIN = re.compile(r"[-+]?[0-9.]{1,6}|true|false|none|null|yes|no|auto|", re.IGNORECASE)
"""Values that are never secret, even if the name of the option is secret: `--max-tokens 512`, `--auth none`."""


_ALWAYS = frozenset({"password", "passwords", "passwd", "passphrase", "secret", "secrets"})
_OF_SERVICES = frozenset(
    [
        "api",
        "access",
        "private",
        "encryption",
        "signing",
        "account",
        "license",
        "ssh",
        "wandb",
        "comet",
        "neptune",
        "openai",
        "aws",
        "azure",
        "gcp",
        "google",
        "hf",
        "github",
        "gitlab",
        "slack",
        "service",
        "auth",
        "basic",
        "user",
        "admin",
        "db",
    ]
)
"""Words by which the options `--…-key` and `--…-auth` are recognised as credentials of a service."""
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_+=-]{16,}")


def is_secret_file(path: str) -> bool:
    """Return True if a file with this path probably contains credentials.

    >>> names = ("credentials.json", ".aws/config", "conf/secrets.yaml", "kubeconfig", "id_rsa")
    >>> [is_secret_file(name) for name in names]
    [True, True, True, True, True]
    >>> [is_secret_file(name) for name in ("train.py", "tokenizer.json", "auth.py", "keys.py")]
    [False, False, False, False]
    """
    *folders, name = path.split("/")
    if not _FOLDER.isdisjoint(folders):
        return True
    return _FILE.fullmatch(name) is not None and _CODE.fullmatch(name) is None


def holds_secret(data: bytes) -> bool:
    """Return True if a text contains a private key or the token of a known service.

    >>> holds_secret(b"key = 'hf_" + b"a" * 34 + b"'"), holds_secret(b"key = os.environ['HF_TOKEN']")
    (True, False)
    """
    return _CONTENT.search(data) is not None


def redact(text: str) -> str:
    """Return a text with `***` in place of every credential.

    >>> redact("postgres://me:hunter2@db/runs")
    'postgres://me:***@db/runs'
    """
    text = _PASSWORD.sub(rf"\1{HIDDEN}", text)
    return SECRET_VALUE.sub(lambda match: match[0] if HIDDEN in match[0] else HIDDEN, text)


def redact_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `***` in place of every secret.

    >>> redact_words(["--lr", "0.1", "--api-key", "abc123", "--token=xyz", "--max-tokens", "512"])
    ['--lr', '0.1', '--api-key', '***', '--token=***', '--max-tokens', '512']
    """
    redacted: list[str] = []
    option = ""
    for word in words:
        match = _OPTION.fullmatch(word)
        if option and not word.startswith("--") and _is_secret_argument(option, word):
            redacted.append(HIDDEN)
        elif match and _is_secret_argument(match[1], match[2]):
            redacted.append(f"{match[1]}={HIDDEN}")
        else:
            redacted.append(redact(word) if is_secret_value(word) else word)
        option = word if word.startswith("-") and "=" not in word else ""
    return redacted


def _is_secret_argument(name: str, value: str) -> bool:
    """Return True if `value`, given for the option `name`, is a secret.

    >>> [_is_secret_argument("--password", "1"), _is_secret_argument("--sort-key", "loss"), _is_secret_argument("--wandb-key", "8f3a")]
    [True, False, True]
    """
    if not is_secret_name(name):
        return False
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if not words.isdisjoint(_ALWAYS) or name.lower().endswith(("password", "secret")):
        return True
    if _PLAIN.fullmatch(value):
        return False
    # the word `key` in the name of an option may mean a dictionary key, as in `--image-key jpg`
    unambiguous = words.isdisjoint({"key", "keys", "auth", "pass", "pin", "sas", "pwd"})
    of_service = not words.isdisjoint(_OF_SERVICES)
    return unambiguous or of_service or _RANDOM.fullmatch(value) is not None


def variable_of(words: Sequence[str], index: int) -> str:
    """Return the name of the environment variable from which a replay reads the hidden argument at `index`.

    >>> words = ["--api-key", "***", "--token=***", "***"]
    >>> [variable_of(words, index) for index in (1, 2, 3)]
    ['REARVIEW_ARG_API_KEY', 'REARVIEW_ARG_TOKEN', 'REARVIEW_ARG_4']
    """
    name = words[index].partition("=")[0] if words[index].endswith(f"={HIDDEN}") else ""
    before = words[index - 1] if index else ""
    if not name and words[index] == HIDDEN and before.startswith("-") and "=" not in before:
        name = before
    name = re.sub(r"[^A-Za-z0-9]+", "_", name.lstrip("-")).upper() or str(index + 1)
    return f"REARVIEW_ARG_{name}"


def fill_secrets(
    words: Sequence[str], values: Mapping[str, str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return a stored command line with its secrets inserted, and the names of variables that are not set.

    `values` maps the names of environment variables (see `variable_of`) to their values.

    >>> fill_secrets(["--api-key", "***", "7"], {"REARVIEW_ARG_API_KEY": "abc"})
    (('--api-key', 'abc', '7'), [])
    >>> fill_secrets(["--token=***"], {})
    (('--token=***',), ['REARVIEW_ARG_TOKEN'])
    """
    filled_words, unset_variables = list(words), []
    for index, word in enumerate(words):
        if HIDDEN not in word:
            continue
        variable = variable_of(words, index)
        if variable not in values:
            unset_variables.append(variable)
        elif word.endswith(f"={HIDDEN}"):
            filled_words[index] = f"{word.removesuffix(HIDDEN)}{values[variable]}"
        else:
            filled_words[index] = values[variable]
    return tuple(filled_words), unset_variables


def redact_value(name: str, value: object) -> object:
    """Return the `value` of the argument `name`, with `***` in place of a secret."""
    if isinstance(value, str) and value:
        if _is_secret_argument(name, value):
            return HIDDEN
        return redact(value)
    return value
