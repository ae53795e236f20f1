"""Parameters that programs read become columns, whatever they read them with."""

import importlib.util

import pytest

from plainly import plain, recorded, write
from rearview._history import history

LOOP = "\n    for epoch in range(2):\n        loss = 1 / (epoch + 1)\n"
PROGRAMS = {
    "argparse": (
        (
            "import argparse\n"
            "p = argparse.ArgumentParser()\n"
            "p.add_argument('--lr', type=float, default=0.1)\n"
            "p.add_argument('--net', default='small')\n"
            "print(p.parse_args())\n"
        ),
        ["--lr", "0.5"],
        {"lr": 0.5, "net": "small"},
    ),
    "click": (
        (
            "import click\n"
            "@click.command()\n@click.option('--lr', default=0.1)\n@click.argument('name')\n"
            f"def main(lr, name):{LOOP}    print(lr, name)\n"
            "main()\n"
        ),
        ["--lr", "0.5", "x"],
        {"lr": 0.5, "name": "x"},
    ),
    "fire": (
        f"import fire\ndef main(lr=0.1, *, layers=3):{LOOP}    print(lr, layers)\nfire.Fire(main)\n",
        ["--lr", "0.5"],
        {"lr": 0.5, "layers": 3},
    ),
    "absl": (
        (
            "from absl import app, flags\n"
            "flags.DEFINE_float('lr', 0.1, 'rate')\nflags.DEFINE_list('sizes', ['1'], 'sizes')\n"
            f"def main(argv):{LOOP}    print(flags.FLAGS.lr)\n"
            "app.run(main)\n"
        ),
        ["--lr=0.5"],
        {"lr": 0.5, "sizes": ["1"]},
    ),
    "yaml": (
        "import yaml\nc = yaml.safe_load(open('c.yaml'))\nprint(c)\n",
        [],
        {"optim.lr": 0.1, "optim.betas": [0.9, 0.99], "seed": 3},
    ),
    "toml": (
        "import tomllib\nwith open('c.toml', 'rb') as f:\n    print(tomllib.load(f))\n",
        [],
        {"optim.lr": 0.1, "seed": 3},
    ),
    "json": (
        (
            "import json\nwith open('c.json') as f:\n    print(json.load(f))\n"
            "with open('vocabulary.json') as f:\n    print(len(json.load(f)))\n"
        ),
        [],
        {"optim.lr": 0.1, "seed": 3},
    ),
    "omegaconf": (
        (
            "from omegaconf import OmegaConf\n"
            "c = OmegaConf.merge(OmegaConf.load('c.yaml'), OmegaConf.from_cli())\n"
            "print(OmegaConf.to_yaml(c))\n"
        ),
        ["seed=7"],
        {"optim.lr": 0.1, "optim.betas": [0.9, 0.99], "seed": 7},
    ),
    "dataclass": (
        (
            "from dataclasses import dataclass, field\n"
            "@dataclass\nclass Optim:\n    lr: float = 0.1\n"
            "@dataclass(slots=True)\nclass Config:\n"
            "    seed: int = 3\n    optim: Optim = field(default_factory=Optim)\n"
            "@dataclass\nclass State:\n    model: object = None\n    data: object = object()\n"
            f"def train(config, state):{LOOP}    print(config.seed)\n"
            "train(Config(seed=5), State())\n"
        ),
        [],
        {"seed": 5, "optim.lr": 0.1},
    ),
}
LIBRARIES = {"absl": "absl", "click": "click", "fire": "fire", "yaml": "yaml"}
FILES = {
    "c.yaml": "optim: {lr: 0.1, betas: [0.9, 0.99]}\nseed: 3\n",
    "c.toml": "seed = 3\n[optim]\nlr = 0.1\n",
    "c.json": '{"optim": {"lr": 0.1}, "seed": 3}',
    "vocabulary.json": str({f"word{k}": k for k in range(1000)}).replace("'", '"'),
}


def lay_out(folder, text):
    write(folder, train=text)
    for name, content in FILES.items():
        (folder / name).write_text(content)


@pytest.mark.parametrize("source", PROGRAMS)
def test_parameters_become_columns_and_nothing_changes_for_the_program(tmp_path, source):
    library = {"omegaconf": "omegaconf", **LIBRARIES}.get(source)
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"LOUD: {library} is not installed, so its parameters are not tested")
    text, words, expected = PROGRAMS[source]
    lay_out(tmp_path, text)
    ended = recorded(tmp_path, "train.py", *words)
    assert (ended.code, ended.out) == (0, plain(tmp_path, "train.py", *words).out), ended.err
    run = history(tmp_path).run()
    assert dict(run.args) == expected
    assert run.arg_origins == dict.fromkeys(expected, source)
    assert "problems" not in run.end.captured
    found = history(tmp_path).sql("SELECT name, origin FROM arguments").rows()
    assert {row["name"]: row["origin"] for row in found} == dict.fromkeys(expected, source)


HYDRA = """
import hydra
from omegaconf import OmegaConf
calls = []
OmegaConf.register_new_resolver("count", lambda: calls.append(1) or len(calls))

@hydra.main(version_base=None, config_path="conf", config_name="main")
def main(cfg):
    for epoch in range(2):
        loss = cfg.optim.lr / (epoch + 1)
    print(cfg.batch, cfg.name, len(calls))

main()
"""


def test_hydras_configuration_becomes_columns_and_its_resolvers_are_not_called(tmp_path):
    if importlib.util.find_spec("hydra") is None:
        pytest.skip("LOUD: hydra is not installed, so its parameters are not tested")
    lay_out(tmp_path, HYDRA)
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "main.yaml").write_text(
        "optim: {lr: 0.1}\nbatch: 32\nname: run-${optim.lr}\nlimit: ${batch}\nodd: ${count:}\n"
    )
    words = ["train.py", "optim.lr=0.5", "hydra.run.dir=out"]
    ended = recorded(tmp_path, *words)
    assert (ended.code, ended.out) == (0, plain(tmp_path, *words).out), ended.err
    assert ended.out == "32 run-0.5 0\n"
    run = history(tmp_path).run()
    assert dict(run.args) == {
        "optim.lr": 0.5,
        "batch": 32,
        "name": "run-0.5",
        "limit": 32,
        "odd": "${count:}",
    }
    assert set(run.arg_origins.values()) == {"hydra"}


def test_parameters_can_be_switched_off_and_secrets_stay_hidden(tmp_path):
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--api_key')\np.parse_args()\n"
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py", "--api_key", "sk-12345678901234567890").code == 0
    assert "12345678901234567890" not in str(history(tmp_path).run().args)
    assert recorded(tmp_path, "train.py", "--api_key", "a", capture="-parameters").code == 0
    assert dict(history(tmp_path).run().args) == {}
