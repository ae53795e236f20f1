// The screen of one run: its facts, logged values, recording cost, and whether its replays were exact.
import { useEffect, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { Edit, Thing, later } from "./runs.js";
import { ChartCard } from "./charts.js";
import { MediaList } from "./media.js";
import { go, link, revision, route, server, setParams } from "./state.js";
import { Button, Code, Empty, Icon, Loading, Status, failed, html, many, moment, num, short, size, span, useData } from "./ui.js";

const TABS = [["overview", "Overview"], ["values", "Values"], ["media", "Media"], ["printed", "Printed"], ["checkpoints", "Checkpoints"], ["environment", "Environment"]];

export function Run() {
  const id = route.value.path.split("/")[2];
  const { data, error } = useData(`${id}/${revision.value}`, (signal) => api.get(`/api/run/${id}`, {}, signal));
  const [edit, setEdit] = useState(null);
  const tab = route.value.params.tab || "overview";
  if (error && !data) return html`<${Empty} title="There is no such run"><p>${error.message}</p><a class="button" href="#/runs">All runs</a></${Empty}>`;
  if (!data) return html`<${Loading} />`;
  const d = data;
  const arrow = (e) => { const at = TABS.findIndex(([k]) => k === tab), step = { ArrowRight: 1, ArrowLeft: -1 }[e.key]; if (step) { setParams({ tab: TABS[(at + step + TABS.length) % TABS.length][0] }); requestAnimationFrame(() => document.querySelector('[role=tab][aria-selected=true]')?.focus()); } };
  return html`<section class="screen pad run" aria-label=${`Run ${id}`}>
    <nav class="crumbs" aria-label="Where this is"><a href="#/runs">Runs</a><${Icon} name="right" size=${12} /><span>${d.run}</span></nav>
    <div class="line"><h1>${d.name || short(d.run)}</h1><${Status} status=${d.status} />${d.verdict && html`<span class=${`proof ${d.verdict === "exact" ? "exact" : "not"}`}>${d.verdict}</span>`}
      ${d.tags.map((t) => html`<span class="chip" key=${t}>${t}</span>`)}<span class="spacer"></span>
      <${Button} icon="tag" onClick=${() => setEdit({ kind: "tag", runs: [d.run], value: d.tags })}>Tags</${Button}><${Button} onClick=${() => setEdit({ kind: "note", runs: [d.run], value: d.note })}>Note</${Button}><${Button} onClick=${() => setEdit({ kind: "name", runs: [d.run] })}>Name</${Button}></div>
    ${d.note && html`<pre class="note">${d.note}</pre>`}
    ${d.damaged && html`<p class="warn">${d.damaged}</p>`}
    <p class="command"><code>${d.command}</code></p>
    <div class="tabs" role="tablist" aria-label="Parts of the run" onKeyDown=${arrow}>${TABS.map(([k, text]) => html`<button type="button" role="tab" id=${`tab-${k}`} aria-selected=${tab === k} aria-controls="tabpanel" tabindex=${tab === k ? 0 : -1} onClick=${() => setParams({ tab: k })}>${text}</button>`)}</div>
    <div id="tabpanel" role="tabpanel" tabindex="0" aria-labelledby=${`tab-${tab}`}>
      ${tab === "overview" && html`<${Overview} d=${d} />`}${tab === "values" && html`<${Values} d=${d} />`}${tab === "media" && html`<${MediaList} alone names=${media(d)} runs=${[d.run]} />`}${tab === "printed" && html`<${Printed} id=${d.run} />`}${tab === "checkpoints" && html`<${Checkpoints} d=${d} />`}${tab === "environment" && html`<${Environment} d=${d} />`}
    </div>
    ${edit && html`<${Edit} what=${edit} close=${() => setEdit(null)} />`}
  </section>`;
}
// Returns [name, kind of its values] for each logged name of a run whose values are not numbers.
const media = (d) => d.names.filter((n) => !["float", "int", "long", "bool"].includes(n.kind)).map((n) => [n.name, server.value.names[n.name]?.kind || n.kind]);
const Pairs = ({ pairs }) => html`<dl class="pairs">${pairs.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => html`<div key=${k}><dt>${k}</dt><dd>${v}</dd></div>`)}</dl>`;

function Overview({ d }) {
  const charts = d.names.filter((n) => ["float", "int", "long"].includes(n.kind) && n.n > 1).sort((a, b) => (b.asked ? 1 : 0) - (a.asked ? 1 : 0)).slice(0, 6), c = d.costs || {};
  return html`<div class="columns2"><div>
      <h2>Facts</h2><${Pairs} pairs=${[["started", `${moment(d.started, true)} on ${d.host}`], ["took", d.ended ? span(d.ended - d.started) : "still running"], ["exit code", d.exit_code || null], ["version", html`<a href=${link("/versions", { a: d.run })}><code>${d.version.slice(0, 12)}</code></a>`],
        ["loops", d.loops.map(([n, k]) => `${n} (${k})`).join(", ")], ["came from", d.parent && html`<a href=${link(`/run/${d.parent}`)}>${d.parent}</a>`], ["forks", d.forks.length ? d.forks.map((f) => html`<a href=${link(`/run/${f}`)}>${short(f)} </a>`) : null]]} />
      <h2>Parameters</h2>${Object.keys(d.args).length ? html`<${Pairs} pairs=${Object.entries(d.args).map(([k, v]) => [k, typeof v === "object" ? JSON.stringify(v) : String(v)])} />` : html`<p class="muted">None were recorded.</p>`}
      <h2>Proof</h2><p>${d.exact}</p>${d.replays.length > 0 && html`<table class="plain"><thead><tr><th>replayed</th><th>for</th><th>verdict</th></tr></thead><tbody>${d.replays.slice(-12).reverse().map((r) => html`<tr key=${r.id}><td>${moment(r.started)}</td><td>${r.names.join(", ") || "as recorded"}</td><td><span class=${`proof ${r.verdict === "exact" ? "exact" : "not"}`} title=${r.why}>${r.verdict}</span></td></tr>`)}</tbody></table>`}
      <h2>Recording cost</h2>${d.ended && d.ended - d.started < 10 ? html`<p class="muted">The run was so short that starting and ending it weigh most.</p>` : ""}<${Pairs} pairs=${[["overhead", c.overhead !== undefined ? `${(100 * c.overhead).toFixed(2)} %` : null], ["computed", span(c.computed)], ["waited for us", span(c.waited)], ["saved", c.saved], ["skipped", c.skipped], ["state", size(d.logical)], ["stored", size(d.stored)]]} />
      <h2>Next</h2>${d.commands.map(([what, text]) => html`<div class="next" key=${text}><small>${what}</small><${Code}>${text}</${Code}></div>`)}
    </div><div>
      ${charts.length ? html`<div class="charts one">${charts.map((n) => html`<${ChartCard} key=${n.name} name=${n.name} runs=${[d.run]} options=${{}} small />`)}</div>` : html`<${Empty} title="No curves"><p>Log a number in a loop: <code>rearview.log("loss", loss)</code></p></${Empty}>`}
    </div></div>`;
}
function Values({ d }) {
  return html`<table class="plain"><thead><tr><th>name</th><th>loops</th><th class="right">values</th><th class="right">last</th><th class="right">lowest</th><th class="right">highest</th><th class="right">mean</th></tr></thead><tbody>
    ${d.names.map((n) => html`<tr key=${n.name}><td>${n.name}${n.asked ? "" : html` <small class="muted" title="Taken from a variable or a printed line; the program gave it to no logger">captured</small>`}${n.unproved ? html`<small class="partly" title="unproved">*</small>` : ""}</td><td class="muted">${n.path || "–"}</td><td class="right">${n.n}</td><td class="right">${n.kind === "object" ? html`<${Thing} text=${n.text} />` : n.last !== null ? num(n.last) : (n.text || "").slice(0, 60)}</td><td class="right">${num(n.low)}</td><td class="right">${num(n.high)}</td><td class="right">${num(n.mean)}</td></tr>`)}</tbody></table>
    ${!d.names.length && html`<p class="muted">Nothing was logged. Add <code>rearview.log("loss", loss)</code> to the script, or record with <code>--autolog</code>.</p>`}`;
}
function Printed({ id }) {
  const [search, setSearch] = useState("");
  const { data } = useData(`${id}/${search}/${revision.value}`, (signal) => api.get(`/api/printed/${id}`, { search }, signal));
  return html`<div class="line"><label class="field search"><${Icon} name="search" /><input type="search" aria-label="Search what was printed" placeholder="Search what was printed" onInput=${later((e) => setSearch(e.target.value))} /></label><span class="muted">${data ? (search ? `${data.found} of ${many(data.total, "line")}` : many(data.total, "line")) : ""}</span></div>
    <div class="printed" tabindex="0" role="region" aria-label="Printed lines">${data?.lines.map(([k, where, stream, text]) => html`<div key=${k} class=${stream}><small>${where || "·"}</small><span>${text}</span></div>`)}${data && !data.total ? html`<p class="muted">It printed nothing.</p>` : ""}</div>`;
}
function Checkpoints({ d }) {
  const most = Math.max(1, ...d.checkpoints.map((c) => c.stored));
  if (!d.checkpoints.length) return html`<p class="muted">None were saved: running it again is no slower than restoring it.</p>`;
  return html`<p class="muted">${many(d.checkpoint_count, "checkpoint")}, ${size(d.logical)} of state, ${size(d.stored)} stored. Only what changed is stored.</p>
    ${d.partial.map((p) => html`<p class="warn">${p}</p>`)}
    <table class="plain"><thead><tr><th>point</th><th class="right">state</th><th class="right">new bytes</th><th></th><th>changed</th><th>usable</th></tr></thead><tbody>${d.checkpoints.map((c) => html`<tr key=${c.id}><td>${c.point} ${c.edge === "end" ? "end" : ""}</td><td class="right">${size(c.bytes)}</td><td class="right">${size(c.stored)}</td><td><span class="meter"><i style=${{ width: `${(100 * c.stored) / most}%` }}></i></span></td><td title=${c.which.join(", ")}>${c.changed} of ${c.parts} parts</td><td>${c.complete ? "yes" : html`<span title=${c.missing.join("; ")}>partly</span>`}</td></tr>`)}</tbody></table>`;
}
function Environment({ d }) {
  return html`<div class="columns2"><div><h2>Machine</h2><${Pairs} pairs=${[["host", d.host], ["python", d.python], ["system", d.machine], ["cpu", d.hardware?.cpu], ["cores", d.hardware?.cores], ["gpus", (d.hardware?.gpus || []).join(", ")], ["folder", d.cwd]]} />
    <h2>Inputs</h2>${d.inputs.length ? html`<table class="plain"><thead><tr><th>file</th><th class="right">size</th><th>hash</th></tr></thead><tbody>${d.inputs.map(([path, bytes, , hash]) => html`<tr key=${path}><td class="clip" title=${path}>${path}</td><td class="right">${typeof bytes === "number" ? size(bytes) : ""}</td><td><code>${String(hash ?? "").slice(0, 12)}</code></td></tr>`)}</tbody></table>` : html`<p class="muted">It read no files of the project or outside of it.</p>`}
    <h2>Files written</h2>${d.files.length ? html`<ul class="plain">${d.files.map((f) => html`<li key=${f.path}>${f.path}</li>`)}</ul>` : html`<p class="muted">None.</p>`}</div>
    <div><h2>Environment variables it read</h2>${d.environment_differences.map((t) => html`<p class="warn">${t}</p>`)}<${Pairs} pairs=${d.environment.map(([k, v, r]) => [k, html`<code>${v ?? "not set"}</code> ${r ? html`<small class="hint">restored in replays</small>` : ""}`])} />
    ${d.packages.length > 0 && html`<h2>Packages</h2><${Pairs} pairs=${d.packages} />`}</div></div>`;
}
