// Shows the plan of a backfill, before and while it runs: numbers, the segments of each worker, inserted statements.
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { go, server, takeOff } from "./state.js";
import { cells } from "./runs.js";
import { Button, Code, Icon, Loading, Select, failed, html, many, short, size, span, useSize } from "./ui.js";

// Assigns segments to workers in order, each to the worker that is free first.
export function scheduled(segments, workers) {
  const free = Array(Math.max(1, workers)).fill(0);
  return segments.map((one, k) => {
    const lane = free.indexOf(Math.min(...free)), begin = free[lane];
    free[lane] += one.seconds;
    return { ...one, segment: k, lane, begin, end: free[lane] };
  });
}

const kindOf = (one) => (one.operator === "setup" ? "setup" : one.operator === "full" || (!one.start && !one.restores?.length) ? "again" : "restored");

// Draws a lane per worker: predicted segments as outlines, real segments as filled bars, checkpoints as marks.
export function Lanes({ plan, workers, events = [], now = null, label }) {
  const box = useRef(), { width } = useSize(box);
  const planned = useMemo(() => scheduled(plan.segments, workers), [plan, workers]);
  const real = useMemo(() => {
    const open = {}, out = [];
    for (const e of events) {
      if (e.event === "started") open[e.segment] = { segment: e.segment, lane: e.worker ?? 0, begin: e.at, run: e.run };
      else if (["proved", "failed", "filled"].includes(e.event)) {
        const one = open[e.segment] || { segment: e.segment, lane: e.worker ?? 0, begin: Math.max(0, e.at - (e.seconds || 0)), run: e.run };
        out.push({ ...one, end: e.at, state: e.event, rows: e.rows });
        delete open[e.segment];
      }
    }
    for (const one of Object.values(open)) out.push({ ...one, end: now ?? one.begin, state: "running" });
    return out;
  }, [events, events.length, now]);
  const offset = real.length ? Math.min(...real.map((r) => r.begin)) : 0;
  const lanes = 1 + Math.max(0, ...planned.map((p) => p.lane), ...real.map((r) => r.lane));
  const longest = Math.max(0.001, ...planned.map((p) => p.end), ...real.map((r) => r.end - offset));
  const left = 64, tall = 34, x = (t) => left + (t / longest) * Math.max(10, width - left - 12);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((s) => s * longest);
  return html`<figure class="lanes" ref=${box} aria-label=${label || "Segments on workers"}>
    ${width > 0 && html`<svg width=${width} height=${lanes * tall + 26} role="img" aria-label=${`${many(plan.count, "segment")} on ${many(lanes, "worker")}, about ${span(longest)}`}>
      ${ticks.map((t) => html`<g><line class="tickline" x1=${x(t)} x2=${x(t)} y1="0" y2=${lanes * tall} /><text class="ticktext" x=${x(t)} y=${lanes * tall + 16} text-anchor=${t === 0 ? "start" : t === longest ? "end" : "middle"}>${t === 0 ? "0" : span(t)}</text></g>`)}
      ${Array.from({ length: lanes }, (_, k) => html`<text class="lanename" x="0" y=${k * tall + 21}>worker ${k + 1}</text>`)}
      ${planned.map((p) => html`<g><title>${`${p.run} ${p.loop ? `${p.loop} ${p.first}:${p.last ?? ""}` : ""}, predicted ${span(p.seconds)} (${span(p.low)} to ${span(p.high)}), ${kindOf(p) === "restored" ? `restored from ${p.start || "checkpoints"}` : kindOf(p) === "setup" ? "set-up only" : "from the start of the run"}`}</title>
        <rect class=${`bar ${kindOf(p)} ${real.length ? "outline" : ""}`} x=${x(p.begin) + 0.5} y=${p.lane * tall + 5} width=${Math.max(2, x(p.end) - x(p.begin) - 1.5)} height=${tall - 10} rx="3" />
        ${(p.restores || []).slice(0, 60).map((i) => html`<circle class="mark" cx=${x(p.begin + (p.end - p.begin) * ((i - p.first) / Math.max(1, (p.last ?? p.first + 1) - p.first)))} cy=${p.lane * tall + tall / 2} r="2" />`)}
        ${x(p.end) - x(p.begin) > 120 && !real.length ? html`<text class="bartext" x=${x(p.begin) + 8} y=${p.lane * tall + 21}>${short(p.run)}</text>` : ""}</g>`)}
      ${real.map((r) => html`<g><title>${`${r.run}: ${r.state}, ${span(r.end - r.begin)}`}</title><rect class=${`bar real ${r.state}`} x=${x(r.begin - offset) + 0.5} y=${r.lane * tall + 9} width=${Math.max(2, x(r.end - offset) - x(r.begin - offset) - 1.5)} height=${tall - 18} rx="2" /></g>`)}
    </svg>`}
    <figcaption><span class="key restored">restored from checkpoints</span><span class="key again">run again from the start</span>${real.length ? html`<span class="key real proved">done and proved</span><span class="key outline">predicted</span>` : ""}</figcaption>
  </figure>`;
}

export function Diff({ text }) {
  return html`<pre class="diff" tabindex="0">${text.trimEnd().split("\n").map((line, k) => html`<span key=${k} class=${line.startsWith("+++") || line.startsWith("---") ? "file" : line[0] === "+" ? "add" : line[0] === "-" ? "remove" : line[0] === "@" ? "at" : ""}>${line}\n</span>`)}</pre>`;
}

export function PlanPanel({ ask, close }) {
  const [plan, setPlan] = useState(null), [error, setError] = useState(""), [workers, setWorkers] = useState("2"), [busy, setBusy] = useState(false);
  const key = JSON.stringify(ask), panel = useRef();
  useEffect(() => {
    setPlan(null); setError("");
    const stop = new AbortController();
    api.get("/api/plan", { q: ask }, stop.signal).then(setPlan, (e) => e.name !== "AbortError" && setError(e.message));
    panel.current?.focus();
    return () => stop.abort();
  }, [key]);
  const fill = async () => {
    setBusy(true);
    try {
      const job = await api.post("/api/backfill", { ...ask, workers: Number(workers) });
      takeOff(job, [...new Set(plan.segments.map((s) => s.run))]);
      cells.value = {};
      close();
    } catch (e) { failed(e); setBusy(false); }
  };
  const on = plan?.workers.find((w) => w.workers === Number(workers));
  const can = server.value.writable && server.value.trusted;
  return html`<aside class="side" aria-label="Plan" ref=${panel} tabindex="-1" onKeyDown=${(e) => e.key === "Escape" && close()}>
    <header><h2>Plan for ${ask.names.join(", ")}</h2><${Button} icon="close" kind="quiet" label="Close the plan" onClick=${close} /></header>
    ${error && html`<p class="warn" role="alert">${error}</p>`}
    ${!plan && !error && html`<${Loading} />`}
    ${plan && html`<div class="scroll">
      ${ask.at && html`<p class="muted">Only ${ask.at}</p>`}
      <dl class="figures"><div><dt>to fill</dt><dd>${plan.missing}</dd></div><div><dt>of</dt><dd>${many(plan.runs, "run")}</dd></div>
        <div><dt>computing</dt><dd>${span(plan.seconds)}</dd></div><div><dt>between</dt><dd>${span(plan.low)} – ${span(plan.high)}</dd></div></dl>
      ${plan.count > 0 ? html`
        <div class="line"><span>Workers</span><${Select} label="Workers" value=${workers} set=${setWorkers} options=${[["1", "1"], ["2", "2"], ["4", "4"], ["8", "8"]]} /><span class="muted">${on ? `done after about ${span(on.seconds)}` : ""}</span></div>
        <${Lanes} plan=${plan} workers=${Number(workers)} />` : html`<p class="muted">${plan.refusals.length ? "Nothing can be run." : "Nothing is missing."}</p>`}
      ${plan.cheaper.length > 0 && html`<h3>Cheaper</h3><ul class="plain">${plan.cheaper.map((c) => html`<li><b>${span(c.saves)} less:</b> ${c.text}</li>`)}</ul>`}
      ${plan.notes.map((n) => html`<p class="warn">${n}</p>`)}
      ${plan.refusals.length > 0 && html`<h3>Refused</h3><ul class="plain">${grouped(plan.refusals).map(([reason, runs]) => html`<li><b>${runs.length > 3 ? many(runs.length, "run") : runs.map(short).join(", ")}:</b> ${reason}</li>`)}</ul>`}
      ${plan.insertions.length > 0 && html`<h3>Goes into the source of each version</h3>${plan.insertions.map((one) => html`<details open=${plan.insertions.length < 3}><summary>${many(one.runs.length, "run")}</summary><${Diff} text=${one.diff} /></details>`)}`}
      <h3>The same on the command line</h3><${Code}>${plan.command}</${Code}>
      <p class="muted">Reads ${size(plan.nbytes_read)} of checkpoints, writes about ${size(plan.nbytes_written)}. Each replay is proved against what was recorded; nothing recorded changes.</p>
    </div>
    <footer>${!can && html`<p class="muted">${server.value.trusted ? html`This page is read-only. Start it with <code>rearview ui --allow-replay</code>.` : html`This store was not made here: <code>rearview trust</code>.`}</p>`}
      <${Button} kind="primary big" icon="play" disabled=${!can || busy || !plan.count} onClick=${fill}>Backfill</${Button}></footer>`}
  </aside>`;
}
function grouped(refusals) {
  const out = new Map();
  for (const { run, reason } of refusals) {
    const text = reason.replace(`run ${run}`, "the run");
    out.set(text, [...(out.get(text) || []), run]);
  }
  return [...out];
}
