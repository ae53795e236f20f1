"""Agents ask about runs through the protocol's own client; nothing runs unless it is allowed."""

import asyncio
import json
import os
import sys

import pytest
from mcp import Client, StdioServerParameters

from plainly import SOURCE, recorded, write

SCRIPT = """
import random
import rearview
lr = rearview.arg("lr", 0.1)
weight = random.random()
for epoch in range(4):
    for step in range(200):
        weight += 0.001 * random.random()
    rearview.log("weight", weight)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    write(folder, train=SCRIPT)
    assert recorded(folder, "train.py").code == 0
    probe = SCRIPT.replace(
        '    rearview.log("weight"',
        '    rearview.log("half", weight / 2)\n    rearview.log("weight"',
    )
    write(folder, train=probe)
    return folder


def ask(folder, *calls, options=()):
    """Return the tools that a server offers, and its answers to calls made in order."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "rearview", "mcp", *options],
        cwd=str(folder),
        env={**os.environ, "PYTHONPATH": SOURCE},
    )

    async def talk():
        async with Client(server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            answers = []
            for call in calls:
                name, given = call(answers) if callable(call) else call
                answers.append(await client.call_tool(name, given))
            return tools, answers

    tools, answers = asyncio.run(talk())
    return tools, [
        json.loads(answer.content[0].text) if not answer.is_error else answer for answer in answers
    ]


def test_an_agent_reads_runs_tables_and_prices_and_cannot_run_anything(project):
    tools, answers = ask(
        project,
        ("runs", {}),
        ("show", {"run": "latest"}),
        ("names", {}),
        ("table", {"names": ["weight"], "limit": 2}),
        (
            "sql",
            {
                "query": "SELECT count(*) AS n FROM records WHERE name = 'weight' AND origin = 'recorded'"
            },
        ),
        ("sql", {"query": "DROP TABLE runs"}),
        ("table", {"names": ["nothing"]}),
        ("price", {"names": ["half"]}),
        ("backfill", {"names": ["half"], "consent": "x"}),
    )
    assert "backfill" not in tools
    assert all(tool.annotations.read_only_hint for tool in tools.values())
    runs, shown, names, table, sql, dropped, unknown, price, refused = answers
    assert runs["total"] == 1
    assert runs["runs"][0]["arguments"] == {"lr": 0.1}
    assert shown["names"] == {"weight": 4}
    assert names == {"names": ["weight"], "without_values": ["half"]}
    assert (len(table["rows"]), table["total_rows"]) == (2, 4)
    assert sql["rows"] == [[4]]
    assert dropped["slug"] == "sql-read-only"
    assert "nothing" in unknown["error"]
    assert price["segments"] >= 1
    assert price["runs"] == [runs["runs"][0]["run"]]
    assert refused.is_error


def test_a_backfill_needs_the_permission_and_the_price(project):
    tools, answers = ask(
        project,
        ("backfill", {"names": ["half"], "consent": "guessed"}),
        ("price", {"names": ["half"]}),
        lambda before: (
            "backfill",
            {"names": ["half"], "consent": json.loads(before[1].content[0].text)["consent"]},
        ),
        ("table", {"names": ["half"]}),
        options=["--allow-replay"],
    )
    assert not tools["backfill"].annotations.read_only_hint
    guessed, _, done, table = answers
    assert guessed["slug"] == "mcp-consent"
    assert (done["values"], done["exact"]) == (4, True)
    assert len(table["rows"]) == 4
