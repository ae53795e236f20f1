"""Find the named numbers in lines that a program prints: `epoch 3 loss 0.12` gives `{"loss": 0.12}`.

docs/capture.md explains to users which numbers are found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LONGEST = 400
"""Number of characters at the beginning of a line that are searched for numbers."""
MOST = 30
"""Maximal count of numbers that are returned for one line."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


POSITIONS = _words(
    "epoch epochs step steps iter iters iteration iterations it i idx index batch batches "
    "global_step round rounds fold trial version v_num eta rank worker gpu device port pid "
    "total_steps max_steps num_epochs n_epochs total_timesteps line"
)
"""Names of progress counters and devices. The numbers after these names are not metrics."""
METRICS = _words(
    "loss losses acc accuracy err error ppl perplexity bleu rouge rouge1 rouge2 rougel f1 auc "
    "roc auroc mse mae rmse mape r2 lr learning_rate reward return score precision recall iou "
    "miou map dice psnr ssim fid nll kl elbo bpc bpb wer cer top1 top5 mfu grad_norm gradnorm "
    "norm logloss time took elapsed throughput speed energy entropy fitness sharpe margin "
    "objective cost mcc kappa specificity sensitivity l1 l2 acc1 acc5 prec1 prec5 ap mrr ndcg "
    "hits dt"
)
"""Names of metrics, or last words of such names. A number after such a name counts even without `:` or `=`."""
_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
    "eval": "eval",
    "evaluation": "eval",
    "dev": "dev",
}
"""Word at the beginning of a line -> name of the data set, which becomes the prefix of all names on the line."""
_ADJECTIVES = _words(
    "avg avg. average mean running total best final smoothed batch epoch top max min last "
    "current weighted macro micro new old mini-batch"
)
"""Words that belong to the name of a metric if they are before it."""

_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)\b"
)
_UNIT = r"(?:%|ms|us|s|sec|secs|seconds|m|min|h|x|k|K|M|G|B|MB|GB|MiB|GiB|TFLOPS|dB|it/s|s/it)"
_WORD = r"[A-Za-z_][\w@/'\u2019.\-]*"
_PAIR = re.compile(
    rf"(?<![\w/.\-])(?P<name>{_WORD}(?:\ (?:\(?{_WORD}\)?)){{0,3}}?)"
    r"(?P<quote>['\"]?)(?P<sep>[ \t]*[:=][ \t]*|[ \t]+)"
    rf"(?P<number>{_NUMBER})(?!\d)"
    rf"(?:[ ]?(?P<unit>{_UNIT})(?![\w/]))?"
    r"(?P<over>[ ]?/[ ]?\d+(?:\.\d+)?)?(?P<percent>[ ]?\([ ]?(?P<share>\d+(?:\.\d+)?)[ ]?%\))?"
    r"(?![\w:/\-]|\.\d)",
    re.IGNORECASE,
)
"""Matches a name, then `:`, `=` or a space, then a number, and optionally a unit, `/total` and a percentage."""
_BAR = re.compile(r"^.*?\d+%\|.*?\|\s*\S+/\S+\s*\[(?P<inside>.*?)\]?\s*$")
"""Matches a progress bar of tqdm; the group `inside` is the text in its brackets."""
_TIMES = re.compile(r"^[^,]*?(?:<[^,]*)?(?:,\s*\S*\s*(?:it|s|B|\w+)/(?:s|\w+))?(?:,|$)")
"""Matches the times and the rate at the beginning of the text in the brackets of a tqdm progress bar."""
_KERAS_BAR = re.compile(r"^\s*\d+/\S+\s+[━=>.\-\s]*\s*(?=\d|-|$)")
_PIPES = re.compile(rf"^\|\s*(?P<name>{_WORD})\s*\|\s*(?P<number>{_NUMBER})\s*\|$")
_SENTENCE = re.compile(
    rf"^\W*(?:the\ )?(?P<name>(?:\w+\ )?(?:accuracy|acc|loss|error|f1|score))\ (?:of|on|for|over)\b"
    rf"[^:=]*?(?::|=|\bis)\s*(?P<number>{_NUMBER})\s*%?\s*\.?$",
    re.IGNORECASE,
)
"""Matches a sentence such as `Accuracy of the network on the 10000 test images: 97 %`."""
_SPLIT_HEAD = re.compile(r"^[\s\W]*(?P<word>[A-Za-z]+)\b(?:\s+set\b)?", re.IGNORECASE)
_STAMP = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*\]?\s*|^\[?\d\d:\d\d:\d\d[.,]?\d*\]?\s*"
)
_LEVEL = re.compile(r"^[\s|:\[\]-]*(?:DEBUG|INFO|WARNING|WARN|ERROR)\b[\s|:\[\]-]*")
_PATHS = re.compile(r"\w+://\S+|(?<![\w.])[\w.~-]*/[\w./-]+\.\w{1,5}\b")
_COLUMNS = re.compile(r"\s{2,}|\t+|\s*\|\s*")
_HEADER_CELL = re.compile(r"[A-Za-z_][\w@/%.\- ]*(?:\(.*\))?")

Number = int | float


def numbers_in(line: str) -> dict[str, Number]:
    """Return {name: number} for the named numbers of a printed line, in order.

    >>> numbers_in("epoch 3 loss 0.12 | Acc: 93.1%")
    {'loss': 0.12, 'acc': 93.1}
    >>> numbers_in("Using 8 workers at http://localhost:8080/")
    {}
    """
    text = _without_noise(line[:LONGEST])
    pipes = _PIPES.match(text)
    sentence = _SENTENCE.match(text)
    if pipes or sentence:
        match = pipes or sentence
        assert match is not None
        name = _column(match["name"])
        return {name: _value(match["number"])} if name not in POSITIONS else {}
    split = _split_of(text)
    numbers: dict[str, Number] = {}
    for match in _PAIR.finditer(text):
        name = _metric_name(match, split)
        if name and name not in numbers and len(numbers) < MOST:
            numbers[name] = _value(match["share"] or match["number"])
    return numbers


@dataclass(slots=True)
class PrintedNumbers:
    """Reads one output stream line by line. The first line of a printed table names the numbers in the next lines."""

    _columns: list[str] = field(default_factory=list)
    """Names of the columns of the current table, from its first line; empty outside tables."""

    def read(self, line: str) -> dict[str, Number]:
        """Return {name: number} for the named numbers of the next line.

        >>> table = PrintedNumbers()
        >>> table.read("epoch     train_loss  valid_loss  time")
        {}
        >>> table.read("0         0.512       0.431       00:03")
        {'train_loss': 0.512, 'valid_loss': 0.431}
        """
        numbers = numbers_in(line)
        if numbers:
            return numbers
        cells = [cell for cell in _COLUMNS.split(line.strip().strip("|").strip()) if cell]
        if len(cells) < 2 or len(line) > LONGEST:
            if cells and not set(line) <= set("-=+| \t"):
                self._columns = []
            return {}
        if all(map(_HEADER_CELL.fullmatch, cells)):
            self._columns = [_column(cell) for cell in cells]
            return {}
        if len(cells) != len(self._columns):
            return {}
        pairs = zip(self._columns, cells, strict=True)
        return {
            name: _value(cell.rstrip("%s"))
            for name, cell in pairs
            if name not in POSITIONS and re.fullmatch(rf"(?:{_NUMBER})[%s]?", cell)
        }


def _without_noise(line: str) -> str:
    """Return a line without progress bars, time stamps, log levels, file paths and URLs."""
    bar = _BAR.match(line)
    if bar:
        return _TIMES.sub("", bar["inside"], count=1)
    text = _STAMP.sub("", line)
    text = _LEVEL.sub("", text)
    text = _KERAS_BAR.sub("", text)
    return _PATHS.sub(" ", text) if "/" in text else text


def _metric_name(match: re.Match[str], split: str) -> str:
    """Return the column name for a name and number that `_PAIR` matched, or "" if the number is not a metric.

    `split` is the result of `_split_of` for the line; the name gets it as a prefix.
    """
    words = match["name"].split(" ")
    only_space = not match["sep"].strip()
    if only_space:
        words = _words_of_metric(words)
        if not words:
            return ""
    last = _column(words[-1])
    if last in POSITIONS or (len(words) == 1 and len(words[0]) == 1 and only_space):
        return ""
    if match["over"] and not match["percent"] and last not in METRICS:
        return ""
    name = _column(" ".join(words))
    if split and not _SPLITS.keys() & set(re.split(r"[_/.]", name)):
        name = f"{split}_{name}"
    return name


def _words_of_metric(words: list[str]) -> list[str]:
    """Return the words at the end of `words` that name a metric; empty if the last word is no metric."""
    plain = re.sub(r"[@_\-].*", "", words[-1].lower())
    if words[-1].lower() not in METRICS and plain not in METRICS:
        parts = re.split(r"[_/\-]", words[-1].lower())
        if len(parts) < 2 or parts[-1] not in METRICS:
            return []
    metric_words = [words[-1]]
    for word in reversed(words[:-1]):
        if word.lower() not in _ADJECTIVES and word.lower() not in _SPLITS:
            break
        metric_words.insert(0, word)
    return metric_words


def _split_of(text: str) -> str:
    """Return the data set that the first word of a line names, by `_SPLITS` ("train", "val", …), or ""."""
    head = _SPLIT_HEAD.match(text)
    return _SPLITS.get(head["word"].lower(), "") if head else ""


def _column(name: str) -> str:
    """Return the column name for a printed name: lower case, with underscores in place of spaces.

    >>> _column("Avg. loss"), _column("valid_0's auc"), _column("Acc@1")
    ('avg_loss', 'valid_0_auc', 'acc@1')
    """
    text = re.sub(r"['\u2019]s?\b", "", name.strip().lower())
    text = re.sub(r"[.\s\-()]+", "_", text)
    return text.strip("_'\"/")


def _value(text: str) -> Number:
    plain = text.replace(",", "")
    try:
        return int(plain)
    except ValueError:
        return float(plain)
