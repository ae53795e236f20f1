import pytest

from rearview.cli import demo
from rearview.cli.demo import SCRIPT, edited


def test_a_folder_with_something_in_it_is_left_alone(command, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = command("demo", str(tmp_path))
    assert code == 2
    assert "is not empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_is_reported(command, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = command("demo", str(tmp_path / "file" / "inside"))
    assert code == 2
    assert "#demo-folder" in err


def test_without_torch_the_demo_names_the_package_to_install(command, monkeypatch, tmp_path):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    code, _, err = command("demo", str(tmp_path))
    assert code == 2
    assert "pip install torch scikit-learn" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [SCRIPT, edited()])
def test_the_script_is_python(text):
    compile(text, "train.py", "exec")


def test_the_script_does_not_know_rearview():
    assert "rearview" not in SCRIPT
    assert edited().count("rearview.log") == 2


def test_a_step_that_fails_ends_the_demo_with_its_code(command, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_show_command", lambda place, *words: 9)
    assert command("demo", str(tmp_path))[0] == 9
