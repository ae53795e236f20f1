"""A real project, a real server and a real browser for the page."""

import shutil
import tempfile
import warnings

import pytest

from pages import FLAGS, PROBED, SCRIPT, record, serving, themed
from rearview._history import history


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A folder with three runs of two versions, and a probe in the source; not to be changed."""
    folder = tmp_path_factory.mktemp("page") / "digits"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    record(folder, "--lr", "0.1")
    (folder / "train.py").write_text(SCRIPT.replace("* 0.1", "* 0.2"))
    record(folder, "--lr", "0.2")
    record(folder, "--lr", "0.2", "--seed", "1")
    (folder / "train.py").write_text(PROBED.replace("* 0.1", "* 0.2"))
    return folder


@pytest.fixture
def project(recorded, tmp_path):
    """A copy of the recorded project, to be changed at will."""
    folder = tmp_path / "digits"
    shutil.copytree(recorded, folder, symlinks=True)
    history(folder).trust()
    return folder


@pytest.fixture
def served(project):
    """The page of a copy of the project, which may be changed through it."""
    with serving(project, writable=True) as found:
        yield found


@pytest.fixture(scope="session")
def reading(recorded):
    """The page of the recorded project, read-only, for all tests that only look."""
    with serving(recorded) as found:
        yield found


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests; skipped, and said so, where there is none."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium or chromedriver is not installed: tests/servers/install gets them")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    folder = tempfile.mkdtemp(prefix="rearview-chromium-")
    for flag in (*FLAGS, f"--user-data-dir={folder}", "--window-size=1280,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def browser(chromium):
    """The browser, as if it had never been used."""
    chromium.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
    chromium.get("about:blank")
    chromium.get_log("browser")
    size = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    themed(chromium, "light")
    return chromium
