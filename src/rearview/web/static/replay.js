// The screen with the backfills that this page started, and all running backfills of the project.
import { useEffect, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { Lanes } from "./plan.js";
import { jobs, link, revision, route, server, watchers } from "./state.js";
import { Button, Code, Empty, Icon, Loading, failed, html, many, moment, short, span } from "./ui.js";

export function Replay() {
  const id = route.value.path.split("/")[2];
  const [list, setList] = useState(null);
  useEffect(() => { api.get("/api/underway").then(setList, failed); }, [revision.value, Object.keys(jobs.value).length, Object.values(jobs.value).filter((j) => j.over).length]);
  if (id) return html`<${Job} id=${id} key=${id} />`;
  if (!list) return html`<${Loading} />`;
  const empty = !list.jobs.length && !list.backfills.length;
  return html`<section class="screen pad" aria-label="Replay"><h1>Replay</h1>
    ${empty && html`<${Empty} title="Nothing is being filled"><p>Add a log statement to the newest source, then choose the empty cells of its column in the <a href="#/runs">table of runs</a>, or type</p><${Code}>rearview backfill NAME --explain</${Code}></${Empty}>`}
    ${list.jobs.length > 0 && html`<h2>Started here</h2><div class="cards">${list.jobs.map((j) => html`<a class="card" href=${link(`/replay/${j.id}`)} key=${j.id}>
      <b>${j.names.join(", ")}</b><span class="muted">${moment(j.started)}</span>
      <span>${j.ended ? (j.done ? `${j.done.written.toLocaleString("en")} values in ${span(j.done.seconds)}` : "stopped") : `${Math.round(100 * (jobs.value[j.id]?.done ?? j.progress.done ?? 0))} %`}</span>
      ${j.done && html`<span class=${`proof ${j.done.exact ? "exact" : "not"}`}>${j.done.exact ? "exact" : j.done.verdict}</span>`}
      ${!j.ended && html`<progress max="1" aria-label="share done" value=${jobs.value[j.id]?.done ?? j.progress.done ?? 0}></progress>`}</a>`)}</div>`}
    ${list.backfills.length > 0 && html`<h2>Under way in this project</h2><${Crews} list=${list.backfills} />`}
  </section>`;
}

export function Crews({ list }) {
  return html`<table class="plain"><thead><tr><th>fills</th><th>started</th><th>workers</th><th>busy</th><th>segments</th><th>left</th></tr></thead><tbody>
    ${list.map((c) => html`<tr key=${c.id}><td>${c.names.join(", ") || "a replay"}</td><td>${moment(c.started)}</td><td><${Workers} crew=${c} /></td><td>${c.busy}</td><td>${c.ended} of ${c.segments}</td><td>${span(c.left)}</td></tr>`)}</tbody></table>`;
}
function Workers({ crew }) {
  const set = (n) => api.post("/api/workers", { backfill: crew.id, workers: n }).catch(failed);
  if (!server.value.writable) return crew.workers;
  return html`<span class="stepper"><button type="button" aria-label="One worker less" disabled=${crew.workers < 2} onClick=${() => set(crew.workers - 1)}>−</button>${crew.workers}<button type="button" aria-label="One worker more" onClick=${() => set(crew.workers + 1)}>+</button></span>`;
}

function Job({ id }) {
  const [job, setJob] = useState(null), [now, setNow] = useState(null);
  const load = () => api.get(`/api/jobs/${id}`).then(setJob, failed);
  useEffect(() => {
    load();
    let soon = null;
    const hear = (event) => {
      if (event.type !== "replay" || event.job !== id) return;
      if (event.event.event === "ended") { load(); return; }
      setJob((old) => {
        if (!old) return old;
        if (event.event.event === "progress") { setNow(event.event.at); return { ...old, progress: event.event }; }
        return event.event.event === "planned" || event.event.event === "done" ? old : { ...old, events: [...old.events, event.event] };
      });
    };
    watchers.add(hear);
    return () => { watchers.delete(hear); clearTimeout(soon); };
  }, [id]);
  if (!job) return html`<${Loading} />`;
  const done = job.done, share = job.ended ? 1 : job.progress.done || 0;
  const proved = job.events.filter((e) => e.event === "proved").length, failedOnes = job.events.filter((e) => e.event === "failed");
  return html`<section class="screen pad" aria-label="One backfill">
    <nav class="crumbs" aria-label="Where this is"><a href="#/replay">Replay</a><${Icon} name="right" size=${12} /><span>${job.names.join(", ")}</span></nav>
    <div class="line"><h1>${job.names.join(", ")}</h1>${!job.ended && server.value.writable && html`<${Button} icon="stop" onClick=${() => api.post("/api/stop", { job: id }).catch(failed)}>Stop</${Button}>`}</div>
    <progress class="wide" max="1" value=${share} aria-label="share done"></progress>
    <dl class="figures"><div><dt>${job.ended ? "took" : "left"}</dt><dd>${job.ended ? span(done?.seconds ?? job.ended - job.started) : span(job.progress.left) || "…"}</dd></div>
      <div><dt>predicted computing</dt><dd>${span(job.plan.seconds)}</dd></div><div><dt>segments</dt><dd>${proved} of ${job.plan.count} proved</dd></div>
      <div><dt>values written</dt><dd>${(done?.written ?? job.events.filter((e) => e.event === "proved").reduce((n, e) => n + (e.rows || 0), 0)).toLocaleString("en")}</dd></div>
      ${done?.speedup >= 1.05 ? html`<div><dt>against training again</dt><dd>${done.speedup.toFixed(1)} × faster</dd></div>` : ""}</dl>
    ${done && html`<p class=${`proofline ${done.exact ? "exact" : "not"}`}><${Icon} name=${done.exact ? "check" : "close"} />${done.proof}</p>`}
    ${job.error && html`<pre class="warn">${job.error}</pre>`}
    <h2>Workers</h2><${Lanes} plan=${job.plan} workers=${Math.max(1, job.progress.workers || 2)} events=${job.events} now=${now} />
    ${failedOnes.length > 0 && html`<h2>Not proved</h2><ul class="plain">${failedOnes.map((e) => html`<li><b>${short(e.run)}</b> ${e.message}</li>`)}</ul>`}
    ${job.plan.refusals.length > 0 && html`<h2>Refused</h2><ul class="plain">${job.plan.refusals.map((r) => html`<li><b>${short(r.run)}</b> ${r.reason}</li>`)}</ul>`}
    <h2>Segments</h2><table class="plain"><thead><tr><th>run</th><th>statement in</th><th>iterations</th><th>from</th><th class="right">predicted</th><th class="right">took</th><th>state</th></tr></thead><tbody>
      ${job.plan.segments.slice(0, 200).map((s, k) => { const end = job.events.find((e) => e.segment === k && ["proved", "failed", "filled"].includes(e.event)), begun = job.events.some((e) => e.segment === k && e.event === "started");
        return html`<tr key=${k}><td><a href=${link(`/run/${s.run}`)}>${short(s.run)}</a></td><td>${s.statement_in}</td><td>${s.loop ? `${s.loop} ${s.first}:${s.last ?? ""}` : ""}</td><td>${s.start || "the start"}</td><td class="right">${span(s.seconds)}</td><td class="right">${end ? span(end.seconds) : ""}</td><td>${end ? end.event : begun ? "running" : job.ended ? "" : "waits"}</td></tr>`; })}</tbody></table>
  </section>`;
}
