// The frame of the page: navigation, keyboard shortcuts, and the screen that the URL names.
import { render } from "./vendor/preact.js";
import { useEffect, useState } from "./vendor/hooks.js";
import { setToken, snapshot } from "./api.js";
import { Charts } from "./charts.js";
import { UnderWay } from "./live.js";
import { Replay } from "./replay.js";
import { Run } from "./run.js";
import { Runs } from "./runs.js";
import { Versions } from "./versions.js";
import { connected, go, jobs, link, locked, reload, route, server, shared, start } from "./state.js";
import { Button, Code, Dialog, Icon, Messages, dark, html, setTheme } from "./ui.js";

const NAV = [["/runs", "runs", "Runs"], ["/charts", "charts", "Charts"], ["/versions", "versions", "Versions"], ["/replay", "replay", "Replay"], ["/live", "live", "Under way"]];
const SCREENS = { runs: Runs, charts: Charts, versions: Versions, replay: Replay, live: UnderWay, run: Run };
const KEYS = [["1 – 5", "the screens"], ["/", "search runs"], ["f", "filter in SQL"], ["↑ ↓ ← →", "move in the table"], ["Space", "choose a run, or a cell that can be filled"], ["Shift + click", "choose the cells between"], ["Enter", "open a run"], ["t", "dark or light"], ["Esc", "close"], ["?", "this list"]];

function App() {
  const [help, setHelp] = useState(false);
  const name = route.value.path.split("/")[1] || "runs", s = server.value;
  useEffect(() => {
    const key = (e) => {
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName) || e.ctrlKey || e.metaKey || e.altKey;
      if (typing) { if (e.key === "Escape") document.activeElement.blur(); return; }
      const at = Number(e.key) - 1;
      if (NAV[at]) go(NAV[at][0], shared.value);
      else if (e.key === "/") { document.getElementById("search")?.focus(); e.preventDefault(); }
      else if (e.key === "f") { document.getElementById("where")?.focus(); e.preventDefault(); }
      else if (e.key === "t") setTheme(!dark.value);
      else if (e.key === "?") setHelp(true);
    };
    document.addEventListener("keydown", key);
    return () => document.removeEventListener("keydown", key);
  }, []);
  useEffect(() => { document.title = `${NAV.find(([p]) => p === `/${name}`)?.[2] || "Run"} · ${s?.project || "Rearview"}`; }, [name, s?.project]);
  if (locked.value) return html`<${Login} />`;
  const Screen = SCREENS[name] || Runs, busy = Object.values(jobs.value).some((j) => !j.over);
  return html`<a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <nav class="sidebar" aria-label="Screens"><a class="brand" href="#/runs"><img src=${snapshot()?.icon || "/static/icon.svg"} width="22" height="22" alt="" /><span>Rearview</span></a>
      <div class="project" title=${s?.root}>${s?.project || " "}</div>
      ${NAV.map(([path, icon, text], k) => html`<a key=${path} class=${`nav ${name === path.slice(1) || (name === "run" && k === 0) ? "on" : ""}`} aria-current=${name === path.slice(1) ? "page" : undefined} href=${link(path, shared.value)} title=${text}><${Icon} name=${icon} size=${18} /><span>${text}</span>${icon === "live" && s?.statuses?.running ? html`<b class="badge">${s.statuses.running}</b>` : ""}${icon === "replay" && busy ? html`<i class="dot"></i>` : ""}</a>`)}
      <span class="spacer"></span>
      <div class="foot"><span class=${`link ${connected.value || snapshot() ? "on" : ""}`} title=${connected.value ? "Changes show at once" : "The server does not answer"}>${snapshot() ? "snapshot" : connected.value ? "live" : "no answer"}</span>
        <${Button} icon=${dark.value ? "sun" : "moon"} kind="quiet" label=${dark.value ? "Light theme" : "Dark theme"} onClick=${() => setTheme(!dark.value)} /><${Button} icon="keys" kind="quiet" label="Keys" onClick=${() => setHelp(true)} /></div>
    </nav>
    <main id="main" tabindex="-1">${s?.problems?.length > 0 && html`<details class="problems"><summary>${s.problems.length} damaged: left out</summary>${s.problems.map((t) => html`<p>${t}</p>`)}</details>`}${s ? html`<${Screen} key=${name} />` : html`<div class="loading" role="status"><span class="dot"></span>reading the runs</div>`}</main>
    ${help && html`<${Dialog} title="Keys" close=${() => setHelp(false)}><dl class="pairs keys">${KEYS.map(([k, text]) => html`<div><dt><kbd>${k}</kbd></dt><dd>${text}</dd></div>`)}</dl></${Dialog}>`}
    <${Messages} />`;
}

function Login() {
  const [text, setText] = useState("");
  return html`<main class="login" id="main"><img src="/static/icon.svg" width="40" height="40" alt="" /><h1>This page needs its token</h1>
    <p>Open the link that <code>rearview ui</code> printed, or paste the token from it.</p>
    <form class="row-form" onSubmit=${(e) => { e.preventDefault(); setToken(text.replace(/^.*#token=/, "")); location.reload(); }}><input class="input" aria-label="Token" value=${text} onInput=${(e) => setText(e.currentTarget.value)} /><button class="button primary" type="submit">Open</button></form></main>`;
}

start();
render(html`<${App} />`, document.getElementById("app"));
