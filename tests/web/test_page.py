"""The page in a real browser: every screen, both themes, and the way from an empty cell to a value."""

from importlib import resources

import pytest

from pages import HOSTILE, PROBED, record, serving, themed
from rearview._history import history
from rearview.web.snapshot import write_snapshot

selenium = pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.common.exceptions import TimeoutException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

WAIT = 120
"""Seconds after which something that should have come is missed."""
SCREENS = {
    "runs": ("#/runs", ".grid .row .runlink"),
    "groups": ("#/runs?group=arg%253Alr", ".grid .row.group"),
    "lines": ("#/charts", ".chart[data-drawn] .u-over"),
    "scatter": ("#/charts?view=scatter", ".canvas canvas"),
    "parallel": ("#/charts?view=parallel", ".canvas canvas"),
    "media": ("#/charts?view=media", ".gallery img"),
    "versions": ("#/versions", ".sides table"),
    "tree": ("#/versions?show=tree", ".tree .node"),
    "probe": ("#/versions?probe=norm", ".probe-place .add"),
    "replay": ("#/replay", ".empty"),
    "under way": ("#/live", ".empty"),
    "run": ("#/run/{run}", ".run .chart[data-drawn]"),
    "media of a run": ("#/run/{run}?tab=media", ".gallery audio"),
    "printed": ("#/run/{run}?tab=printed", ".printed div"),
    "checkpoints": ("#/run/{run}?tab=checkpoints", "#tabpanel p"),
    "environment": ("#/run/{run}?tab=environment", ".pairs dd"),
}
"""What to open, and what is there once the screen is."""


def find(browser, selector, *, many=False):
    """Return the element, or all of them, once there is one."""

    def there(_):
        found = browser.find_elements(By.CSS_SELECTOR, selector)
        return found or False

    try:
        found = WebDriverWait(browser, WAIT, 0.05).until(there)
    except TimeoutException:
        said = [entry["message"] for entry in browser.get_log("browser")]
        text = browser.find_element(By.TAG_NAME, "body").text[:600]
        raise AssertionError(f"no {selector!r}; the page shows {text!r} and says {said}") from None
    return found if many else found[0]


def until(browser, holds):
    """Wait until a function of nothing returns something true; return that."""
    return WebDriverWait(browser, WAIT, 0.05).until(lambda _: holds())


def button(browser, text):
    """Return the button with a text, once it can be pressed."""

    def there():
        for one in browser.find_elements(By.CSS_SELECTOR, "button"):
            if text in one.text and one.is_enabled() and one.is_displayed():
                return one
        return None

    return until(browser, there)


def show(browser, hash_):
    """Go to an address of the page."""
    browser.execute_script("location.hash = arguments[0]", hash_)


def opened(browser, served):
    """Open the page by its link and wait for its table."""
    browser.get(served.link)
    find(browser, ".grid .row .runlink")


def complaints(browser):
    """Return what the browser has to say against the page."""
    return [
        one["message"]
        for one in browser.get_log("browser")
        if one["level"] in {"SEVERE", "WARNING"}
    ]


@pytest.fixture(scope="session")
def axe():
    import axe_core_python

    return (resources.files(axe_core_python) / "axe.min.js").read_text("utf-8")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_screen_can_be_read_by_everybody(browser, reading, axe, theme):
    themed(browser, theme)
    opened(browser, reading)
    run = reading.page.index.runs()[0].id
    assert browser.execute_script("return document.documentElement.dataset.theme") == theme
    browser.execute_script(axe)
    for name, (hash_, ready) in SCREENS.items():
        show(browser, hash_.format(run=run))
        find(browser, ready)
        found = browser.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']}).then(done)"
        )
        assert len(found["passes"]) > 10, name
        wrong = [
            (one["id"], [node["html"][:160] for node in one["nodes"][:3]])
            for one in found["violations"]
        ]
        assert not wrong, (theme, name, wrong)
    assert complaints(browser) == []


@pytest.mark.parametrize("width", [1280, 1920])
def test_nothing_is_wider_than_the_window(browser, reading, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    opened(browser, reading)
    run = reading.page.index.runs()[0].id
    for hash_, ready in SCREENS.values():
        show(browser, hash_.format(run=run))
        find(browser, ready)
        wide = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.getElementById('main').scrollWidth"
            " - document.getElementById('main').clientWidth]"
        )
        assert wide[0] <= width
        assert wide[1] <= 0, hash_


def test_an_empty_cell_is_chosen_priced_filled_and_shows_its_value(browser, served):
    opened(browser, served)

    def priced():
        found = browser.find_elements(By.CSS_SELECTOR, ".cell.fill")
        return len(found) == 3 and all(cell.text.endswith("s") for cell in found) and found

    empty = until(browser, priced)
    empty[0].click()
    bar = find(browser, ".actions")
    assert "1 cell of norm in 1 run" in bar.text
    assert "about" in bar.text
    button(browser, "Show the plan").click()
    side = find(browser, ".side .lanes svg")
    assert "5 cells" in find(browser, ".side .figures").text
    assert "rearview.log" in find(browser, ".side .diff .add").text
    assert side.find_elements(By.CSS_SELECTOR, ".bar")
    button(browser, "Backfill").click()
    until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, ".cell.fill")) == 2)
    until(browser, lambda: not browser.find_elements(By.CSS_SELECTOR, ".cell.filling"))
    newest = served.page.index.runs()[-1].id
    value = served.page.history.table("norm", runs=[newest]).rows()[-1]["norm"]
    shown = find(browser, f'.row .cell span[title="{value}"]')
    assert float(shown.text) == pytest.approx(value, rel=1e-3)
    show(browser, "#/replay")
    find(browser, "a.card .proof.exact")
    find(browser, "a.card").click()
    assert "exact" in find(browser, ".proofline.exact").text
    assert find(browser, ".lanes .bar.real.proved")
    assert complaints(browser) == []


def test_a_page_that_may_change_nothing_says_how_to(browser, reading):
    opened(browser, reading)
    until(
        browser,
        lambda: any(
            c.text.endswith("s") for c in browser.find_elements(By.CSS_SELECTOR, ".cell.fill")
        ),
    )
    find(browser, ".cell.fill").click()
    button(browser, "Show the plan").click()
    find(browser, ".side .figures")
    assert "--allow-replay" in find(browser, ".side footer").text
    assert not browser.find_element(By.CSS_SELECTOR, ".side footer button").is_enabled()


def test_the_filter_completes_narrows_and_explains_itself(browser, reading):
    opened(browser, reading)
    box = find(browser, "#where")
    box.send_keys("l")
    hints = "return [...document.querySelectorAll('.hints li span')].map(e => e.innerText)"
    until(browser, lambda: "lr" in browser.execute_script(hints))
    box.send_keys("r > 0.15", Keys.ENTER)
    until(browser, lambda: "2 of 3 runs" in find(browser, ".count").text)
    assert "where=lr" in browser.current_url
    box.send_keys(" and", Keys.ENTER)
    assert "cannot be read" in find(browser, ".wrongly").text


def test_a_link_opens_the_view_that_it_was_copied_from(browser, reading):
    opened(browser, reading)
    hash_ = "#/runs?where=lr+%3E+0.15&sort=-last%253Aloss&cols=last%253Aloss%2Carg%253Alr"
    base = reading.link.partition("#")[0]
    browser.get("about:blank")
    browser.get(f"{base}{hash_}")
    until(browser, lambda: "2 of 3" in find(browser, ".count").text)
    heads = [e.text for e in find(browser, ".cell.head .name", many=True)]
    assert heads == ["loss", "lr"]
    assert find(browser, '[aria-sort="descending"]')


def test_rows_that_are_still_there_are_not_shown_under_other_columns(browser, reading):
    opened(browser, reading)
    run = reading.page.index.runs()[-1]
    slow = {"offline": False, "latency": 1500, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", slow)
    try:
        show(browser, "#/runs?cols=fact%253Atags%2Cfact%253Aseconds%2Carg%253Alr")
        find(browser, '.cell.head button[title="Sort by tags"]')
        texts = browser.execute_script(
            "return [...document.querySelectorAll('.grid .row')].map(r => r.innerText)"
        )
        assert not any("NaN" in text for text in texts)
        until(browser, lambda: f"{run.args['lr']}" in find(browser, ".grid-body").text)
    finally:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**slow, "latency": 0})
        browser.execute_cdp_cmd("Network.disable", {})
    assert complaints(browser) == []


def test_the_table_is_used_by_keys_alone(browser, reading):
    opened(browser, reading)
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") == "search"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    grid = find(browser, ".grid")
    browser.execute_script("arguments[0].focus()", grid)
    grid.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.SPACE)
    until(browser, lambda: "1 run chosen" in find(browser, ".actions").text)
    grid.send_keys(Keys.ENTER)
    find(browser, ".run h1")
    browser.find_element(By.TAG_NAME, "body").send_keys("t")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    browser.find_element(By.TAG_NAME, "body").send_keys("2")
    find(browser, ".charts-screen")


def test_runs_are_grouped_with_a_band_over_seeds(browser, reading):
    opened(browser, reading)
    button(browser, "Group").click()
    button(browser, "mean and band over seeds").click()
    rows = until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".row.group"))
    assert len(rows) == 2
    assert "±" in find(browser, ".grid-body").text
    find(browser, ".caret").click()
    find(browser, ".row.inner .runlink")


def test_a_brush_zooms_all_charts_and_asks_about_the_chosen_epochs(browser, served):
    from selenium.webdriver import ActionChains

    opened(browser, served)
    show(browser, "#/charts")
    over = find(browser, '.chart[data-name="loss"][data-drawn] .u-over')
    wide = over.size["width"]
    chain = ActionChains(browser).move_to_element_with_offset(over, -wide // 4, 0).click_and_hold()
    chain.move_by_offset(wide // 2, 0).release().perform()
    until(browser, lambda: "zoom=" in browser.current_url)
    button(browser, "Ask here").click()
    button(browser, "Fill norm of these iterations").click()
    find(browser, ".side .figures")
    assert "epoch=1:4" in find(browser, ".side").text


def test_only_charts_that_can_be_seen_exist(browser, tmp_path):
    from recorded import Recorded, at

    made = Recorded(tmp_path)
    made.run(*((at(epoch=e), {f"m{k:03d}": float(e) for k in range(120)}) for e in range(3)))
    history(tmp_path).trust()
    with serving(tmp_path) as found:
        browser.get(found.link)
        find(browser, ".grid .row .runlink")
        show(browser, "#/charts")
        find(browser, ".chart[data-drawn]")
        assert len(browser.find_elements(By.CSS_SELECTOR, ".chart")) == 120
        assert len(browser.find_elements(By.CSS_SELECTOR, ".chart canvas")) < 30
        scroll = find(browser, ".charts-scroll")
        browser.execute_script("arguments[0].scrollTop = arguments[0].scrollHeight", scroll)
        find(browser, '.chart[data-name="m119"][data-drawn]')
        until(
            browser,
            lambda: not browser.find_elements(By.CSS_SELECTOR, '.chart[data-name="m000"] canvas'),
        )


def test_names_notes_and_texts_are_shown_and_never_obeyed(browser, served):
    run = served.page.index.runs()[0].id
    past = served.page.history
    past.name(run, HOSTILE[:90])
    past.tag(run, "<script>x</script>")
    past.note(run, HOSTILE)
    served.page.live.look_now()
    browser.get(served.link)
    until(browser, lambda: HOSTILE in find(browser, ".grid-body").text)
    show(browser, f"#/run/{run}")
    until(browser, lambda: HOSTILE in find(browser, "pre.note").text)
    show(browser, "#/charts?view=media")
    until(browser, lambda: "<b>done</b>" in find(browser, ".gallery .text").text)
    assert browser.execute_script("return document.body.dataset.owned") is None
    assert not browser.find_elements(By.CSS_SELECTOR, "#app b.injected, #app script")


def test_a_logged_sound_can_be_played_and_a_logged_table_be_read(browser, reading):
    opened(browser, reading)
    show(browser, "#/charts?view=media")
    find(browser, ".gallery audio")
    seconds = until(
        browser,
        lambda: browser.execute_script(
            "const a = document.querySelector('.gallery audio'); return a.readyState ? a.duration : 0"
        ),
    )
    assert seconds == pytest.approx(0.1)
    table = find(browser, 'section[aria-label="errors"] table')
    assert [cell.text for cell in table.find_elements(By.CSS_SELECTOR, "th, td")] == [
        *("class", "share", "<i>cat</i>", "0.25", "dog", "0.75"),
    ]
    counts = find(browser, 'section[aria-label="confusion"] td', many=True)
    assert [cell.text for cell in counts[:4]] == ["7", "2", "1", "9"]
    run = reading.page.index.runs()[0].id
    show(browser, f"#/run/{run}?tab=media")
    until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, ".gallery audio")) == 1)
    assert complaints(browser) == []


def test_versions_are_shown_as_one_tree_that_keys_walk_through(browser, reading):
    opened(browser, reading)
    show(browser, "#/versions?show=tree")
    nodes = find(browser, ".tree .node", many=True)
    figures = dict(
        zip(
            [e.text for e in find(browser, ".treeview .figures dt", many=True)],
            [e.text for e in find(browser, ".treeview .figures dd", many=True)],
            strict=True,
        )
    )
    assert figures["versions"] == "3"
    assert int(figures["cells"]) == len(nodes)
    assert int(figures["shared"]) > 0
    browser.execute_script("document.querySelector('.tree .node').focus()")
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert "import argparse" in find(browser, ".treecell pre").text
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    until(browser, lambda: "import argparse" not in find(browser, ".treecell pre").text)
    assert browser.switch_to.active_element.get_attribute("data-node") == "1"
    assert complaints(browser) == []


def test_the_browser_itself_refuses_script_in_the_page(browser, reading):
    opened(browser, reading)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'document.body.dataset.owned = 1';"
        "document.body.append(s);"
        "const b = document.createElement('div'); b.innerHTML = arguments[0]; document.body.append(b)",
        HOSTILE,
    )
    until(browser, lambda: any("Content Security Policy" in text for text in complaints(browser)))
    assert browser.execute_script("return document.body.dataset.owned") is None


def test_a_tag_and_a_note_are_written_from_the_table(browser, served):
    opened(browser, served)
    run = served.page.index.runs()[-1].id
    find(browser, f'input[aria-label="Choose run {run}"]').click()
    button(browser, "Tag").click()
    find(browser, "dialog input").send_keys("baseline", Keys.ENTER)
    until(browser, lambda: "baseline" in find(browser, ".grid-body").text)
    assert served.page.history.run(run).tags == ("baseline",)


def test_a_run_shows_while_the_page_is_open(browser, served, project):
    opened(browser, served)
    assert len(find(browser, ".grid .row", many=True)) == 3
    record(project, "--lr", "0.3")
    until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, ".grid .row")) == 4)


def test_a_probe_is_moved_by_hand_and_back(browser, served):
    opened(browser, served)
    show(browser, "#/versions?probe=norm")
    find(browser, ".probe-place button.lineno", many=True)[0].click()
    button(browser, "Before it").click()
    until(browser, lambda: "placed by hand" in find(browser, ".versionmain").text)
    assert len(served.page.history.corrections(["norm"])) == 1
    button(browser, "Forget the place").click()
    until(browser, lambda: "placed by hand" not in find(browser, ".versionmain").text)


def test_without_the_token_the_page_asks_for_it(browser, reading):
    browser.get(f"http://127.0.0.1:{reading.port}/#token=wrong-wrong-wrong")
    box = find(browser, ".login input")
    box.send_keys(reading.page.token, Keys.ENTER)
    find(browser, ".grid .row .runlink")


def test_a_project_without_runs_names_the_command_to_type(browser, tmp_path):
    from rearview.store.project import Project

    Project.create(tmp_path)
    (tmp_path / "train.py").write_text(PROBED)
    history(tmp_path).trust()
    with serving(tmp_path) as found:
        browser.get(found.link)
        assert "rearview run train.py" in find(browser, ".empty").text


def test_a_snapshot_opens_as_a_file_and_shows_every_screen(browser, project, tmp_path):
    past = history(project)
    run = past.runs()[0].id
    past.note(run, "</script><script>document.body.dataset.owned = 1</script>")
    file = write_snapshot(past, tmp_path / "out")
    browser.get(file.as_uri())
    find(browser, ".grid .row .runlink")
    for name, (hash_, ready) in SCREENS.items():
        show(browser, hash_.format(run=run))
        assert find(browser, ready), name
    assert browser.execute_script("return document.body.dataset.owned") is None
    assert [c for c in complaints(browser) if "favicon" not in c] == []


def test_the_page_is_light():
    from rearview.web.server import static_files

    total = sum(len(file.gzipped) for path, file in static_files().items() if "NOTICE" not in path)
    assert total < 150_000


def test_the_log_of_a_browser_is_read(browser, reading):
    opened(browser, reading)
    browser.execute_script("console.warn('noticed')")
    assert any("noticed" in text for text in complaints(browser))
