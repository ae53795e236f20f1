// Charts: lines over loops, scatter and parallel coordinates over runs, histograms, images, texts.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { draw, toPng, toSvg } from "./plot.js";
import { MediaList } from "./media.js";
import { Parallel, Scatter } from "./pictures.js";
import { PlanPanel } from "./plan.js";
import { SqlBox, baseQuery, filterError, planning } from "./runs.js";
import { go, link, picked, pinned, revision, route, server, setParams } from "./state.js";
import { Button, Code, Empty, Icon, Menu, Popover, Select, Toggle, colorOf, dark, failed, html, many, num, short, useData, useSize } from "./ui.js";

const NUMERIC = new Set(["float", "int", "long", "bool"]);
const VIEWS = [["lines", "Lines"], ["scatter", "Scatter"], ["parallel", "Parallel"], ["media", "Images, sounds, tables"]];

export function Charts() {
  const s = server.value, p = route.value.params;
  const view = p.view || "lines", most = Number(p.most || 12);
  const base = baseQuery(), mine = base.runs?.length ? base.runs : picked.value.size ? [...picked.value] : null;
  const key = mine ? `=${mine}` : JSON.stringify([base, most]);
  const { data, error } = useData(`${key}/${revision.value}`, (signal) => (mine ? Promise.resolve({ runs: mine.slice(0, 500) }) : api.get("/api/chosen", { q: { ...base, limit: most } }, signal)));
  useEffect(() => { filterError.value = error && base.where ? error.message : ""; }, [error]);
  const runs = data?.runs || [];
  if (!s.runs) return html`<${Empty} title="Nothing to draw yet"><p>Record a run that logs a number in a loop:</p><${Code}>rearview run train.py</${Code}></${Empty}>`;
  return html`<section class="screen charts-screen" aria-label="Charts">
    <div class="toolbar"><div class="segmented" role="group" aria-label="Kind of chart">${VIEWS.map(([k, text]) => html`<button type="button" aria-pressed=${view === k} onClick=${() => setParams({ view: k })}>${text}</button>`)}</div>
      <${SqlBox} value=${p.where || ""} />
      ${mine ? html`<span class="muted">${many(runs.length, "chosen run")}</span><${Button} kind="quiet" onClick=${() => { picked.value = new Set(); setParams({ runs: "" }); }}>All runs</${Button}>` : html`<${Select} label="How many runs" value=${String(most)} set=${(v) => setParams({ most: v })} options=${[["6", "newest 6"], ["12", "newest 12"], ["50", "newest 50"], ["200", "newest 200"]].map(([v, t]) => [v, base.sort.length ? t.replace("newest", "first") : t])} />`}
    </div>
    <div class="split"><div class="main">
      ${view === "lines" && html`<${Lines} runs=${runs} />`}
      ${view === "scatter" && html`<${Scatter} base=${base} />`}
      ${view === "parallel" && html`<${Parallel} base=${base} />`}
      ${view === "media" && html`<${Media} runs=${runs} />`}
    </div>${planning.value && html`<${PlanPanel} ask=${planning.value} close=${() => (planning.value = null)} />`}</div>
  </section>`;
}

function Lines({ runs }) {
  const p = route.value.params, s = server.value;
  const [hidden, setHidden] = useState(new Set());
  const [groupOf, setGroupOf] = useState(null);
  const group = p.by || "";
  useEffect(() => {
    if (!group || !runs.length) { setGroupOf(null); return; }
    let on = true;
    api.get("/api/table", { q: { columns: [group], runs, limit: 500 } }).then(({ rows }) => {
      if (!on) return;
      const values = [...new Set(rows.map((r) => r[1]))].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
      setGroupOf({ by: group, runs: Object.fromEntries(rows.map((r) => [r[0], values.indexOf(r[1])])), values });
    }, failed);
    return () => { on = false; };
  }, [group, runs.join()]);
  useEffect(() => setHidden(new Set()), [runs.join(), group]);
  const only = p.names ? p.names.split(",").map(decodeURIComponent) : null;
  const names = Object.entries(s.names).filter(([n, a]) => NUMERIC.has(a.kind) && a.runs > 0 && a.path && (!p.find || n.toLowerCase().includes(p.find.toLowerCase())) && (!only || only.includes(n))).sort((a, b) => (b[1].asked ? 1 : 0) - (a[1].asked ? 1 : 0)).map(([n]) => n);
  const sections = useMemo(() => {
    const out = new Map();
    for (const n of names) { const at = names.length > 12 && n.includes("/") ? n.split("/")[0] : ""; out.set(at, [...(out.get(at) || []), n]); }
    return [...out].sort(([a], [b]) => a.localeCompare(b));
  }, [names.join("\n")]);
  const labels = groupOf ? groupOf.values.map((v) => `${group.split(":")[1]} ${v === null ? "–" : num(v)}`) : runs.map(short);
  const options = { x: p.x || "loop", smooth: Number(p.smooth || 0), logx: p.logx === "1", logy: p.logy === "1", zoom: p.zoom ? p.zoom.split(":").map(Number) : null };
  const by = Object.entries(s.args).filter(([, a]) => a.distinct > 1).map(([n]) => [`arg:${n}`, `by ${n}`]);
  const args = { group: groupOf?.by === group ? groupOf : null, hidden, labels };
  const empties = s.virtual.filter((n) => (s.names[n]?.runs || 0) < s.runs);
  return html`<div class="subbar">
      <label class="field search"><${Icon} name="search" /><input type="search" aria-label="Find a chart" placeholder="Find a chart" value=${p.find || ""} onInput=${(e) => setParams({ find: e.currentTarget.value })} /></label>
      <${Select} label="What is across" value=${options.x} set=${(v) => setParams({ x: v, zoom: "" })} options=${[["loop", "over the loop"], ["step", "over steps"], ["time", "over time"]]} />
      <${Select} label="Group the runs" value=${group} set=${(v) => setParams({ by: v })} options=${[["", "each run"], ...by, ["fact:status", "by status"], ["fact:version", "by version"]]} />
      <label class="slider"><span>Smooth</span><input type="range" min="0" max="0.98" step="0.02" value=${options.smooth} aria-label="Smoothing" onInput=${(e) => setParams({ smooth: e.currentTarget.value === "0" ? "" : e.currentTarget.value })} /><output>${options.smooth || "off"}</output></label>
      <${Toggle} on=${options.logy} set=${(v) => setParams({ logy: v ? "1" : "" })}>log y</${Toggle}><${Toggle} on=${options.logx} set=${(v) => setParams({ logx: v ? "1" : "", zoom: "" })}>log x</${Toggle}>
      ${options.zoom && html`<span class="zoomed"><b>${num(options.zoom[0])} – ${num(options.zoom[1])}</b><${Button} kind="quiet small" onClick=${() => setParams({ zoom: "" })}>Whole</${Button}>
        ${options.x === "loop" && empties.length > 0 && html`<${Popover} icon="fill" kind="small" label="Ask here" text=${html`<span>Ask here</span>`}>${(close) => html`<${Menu} close=${close} items=${empties.map((n) => ({ text: `Fill ${n} of these iterations`, icon: "fill", act: () => {
          const loop = (s.names[n]?.path || Object.values(s.names)[0].path).split("/")[0];
          planning.value = { names: [n], runs, at: `${loop}=${Math.ceil(options.zoom[0])}:${Math.floor(options.zoom[1]) + 1}` };
        } }))} />`}</${Popover}>`}</span>`}
      ${only && html`<${Button} kind="quiet" onClick=${() => setParams({ names: "" })}>All charts</${Button}>`}
    </div>
    <div class="legend" role="group" aria-label="Lines">${labels.slice(0, 40).map((text, k) => html`<button type="button" key=${text + k} aria-pressed=${!hidden.has(k)} class=${hidden.has(k) ? "off" : ""} onClick=${(e) => { const now = e.altKey ? new Set(labels.map((_, n) => n).filter((n) => n !== k)) : new Set(hidden); if (!e.altKey) { if (now.has(k)) now.delete(k); else now.add(k); } setHidden(now); }} title="Hide or show; with Alt, only this one"><i style=${{ background: colorOf(k) }}></i>${text}</button>`)}${labels.length > 40 ? html`<span class="muted">and ${labels.length - 40} more</span>` : ""}</div>
    <div class="scroll charts-scroll" tabindex="0" role="region" aria-label="Charts of logged names">
      ${!names.length && html`<${Empty} title=${p.find ? "No chart has that name" : "No numbers were logged in a loop"}><p>${p.find ? "Change what is searched for." : html`Log one: <code>rearview.log("loss", loss)</code>`}</p></${Empty}>`}
      ${sections.map(([title, some]) => html`<section key=${title}>${sections.length > 1 && html`<h2 class="section">${title || "others"}<small>${some.length}</small></h2>`}
        <div class="charts">${some.map((n) => html`<${ChartCard} key=${n} name=${n} runs=${runs} options=${options} ...${args} />`)}</div></section>`)}
    </div>`;
}

// A chart is drawn only while it is (nearly) in view.
export function ChartCard({ name, runs, options, group, hidden, labels, small }) {
  const box = useRef(), plot = useRef(), chart = useRef(null), tip = useRef();
  const { width } = useSize(box);
  const [seen, setSeen] = useState(false), [data, setData] = useState(null), [took, setTook] = useState(null);
  const height = small ? 170 : 220;
  useEffect(() => {
    const watch = new IntersectionObserver(([e]) => setSeen(e.isIntersecting), { rootMargin: "200px" });
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const pixels = Math.max(50, Math.round(width - 70)), zoom = options.zoom;
  const key = JSON.stringify([name, runs, options.x, zoom, group?.runs, pixels > 50 ? pixels : 0]);
  useEffect(() => {
    if (!seen || !runs.length || pixels <= 50) return;
    const stop = new AbortController(), begun = performance.now();
    api.chart({ name, runs, x: options.x || "loop", pixels, ...(zoom ? { lo: zoom[0], hi: zoom[1] } : {}), ...(group ? { group: group.runs } : {}) }, stop.signal)
      .then((d) => { setData({ ...d, begun }); }, failed);
    return () => stop.abort();
  }, [seen, key, revision.value]);
  const names = labels || runs.map(short);
  useLayoutEffect(() => {
    if (!seen || !data || width < 60) return;
    const lines = [];
    for (const line of data.lines) lines[group ? line.group : runs.indexOf(line.run)] = line;
    const all = lines.map((l) => l || { data: [new Float64Array(0), new Float64Array(0)] });
    if (!data.lines.length) return;
    chart.current = draw(plot.current, {
      lines: Array.from(all, (l) => l || { data: [new Float64Array(0), new Float64Array(0)] }), labels: names, hidden, width: Math.floor(width) - 2, height, ...options,
      spanned: (a, b) => setParams({ zoom: `${Number(a.toPrecision(7))}:${Number(b.toPrecision(7))}` }),
      tip: (u, alone) => showTip(tip.current, u, alone, names),
    });
    const el = box.current;
    el.dataset.drawn = String(Math.round(performance.now() - data.begun));
    el.dataset.points = data.points;
    return () => { chart.current?.destroy(); chart.current = null; };
  }, [seen, data, width, options.logx, options.logy, options.smooth, dark.value, hidden, names.join()]);
  const about = server.value.names[name] || {};
  return html`<figure class="chart" ref=${box} data-name=${name} style=${{ minHeight: `${height + 38}px` }}>
    <figcaption><span class="title">${name}</span>${about.path && html`<small>${options.x === "step" ? "step" : options.x === "time" ? "seconds" : about.path.split("/")[0]}</small>`}<span class="spacer"></span>
      <${Popover} icon="more" kind="quiet tiny" label=${`Menu of the chart ${name}`} align="right">${(close) => html`<${Menu} close=${close} items=${[
        { text: "Only this chart", icon: "charts", act: () => go("/charts", { ...route.value.params, names: encodeURIComponent(name) }) },
        { text: "Download PNG", icon: "sortdown", act: async () => chart.current && api.saveBlob(await toPng(chart.current, name), `${name.replaceAll("/", "_")}.png`) },
        { text: "Download SVG", icon: "sortdown", act: () => chart.current && api.saveBlob(new Blob([toSvg(chart.current, name)], { type: "image/svg+xml" }), `${name.replaceAll("/", "_")}.svg`) },
      ]} />`}</${Popover}></figcaption>
    <div class="plot" ref=${plot} role="img" aria-label=${`${name} of ${many(runs.length, "run")}${data ? `, ${data.points.toLocaleString("en")} points` : ""}`}></div>
    ${data && !data.lines.length && html`<p class="nothing">no values in these runs</p>`}
    <div class="tip" ref=${tip} hidden></div>
  </figure>`;
}

function showTip(node, u, alone, labels) {
  const { idx, left } = u.cursor;
  if (!node) return;
  if (idx === null || idx === undefined || left < 0) { node.hidden = true; return; }
  const found = [];
  for (const [series, k] of alone) {
    let at = idx, v = u.data[series][at];
    for (let step = 1; (v === null || v === undefined) && step < 40; step++) v = u.data[series][idx - step] ?? u.data[series][idx + step];
    if (v !== null && v !== undefined) found.push([k, v]);
  }
  found.sort((a, b) => b[1] - a[1]);
  const rows = found.length > 9 ? [...found.slice(0, 4), null, ...found.slice(-4)] : found;
  node.replaceChildren();
  const head = document.createElement("div");
  head.className = "at"; head.textContent = num(u.data[0][idx], 6);
  node.append(head);
  for (const row of rows) {
    const line = document.createElement("div");
    if (!row) { line.textContent = `… ${found.length - 8} between`; line.className = "at"; } else {
      const dot = document.createElement("i"), text = document.createElement("span"), value = document.createElement("b");
      dot.style.background = colorOf(row[0]); text.textContent = labels[row[0]] ?? ""; value.textContent = num(row[1]);
      line.append(dot, text, value);
    }
    node.append(line);
  }
  node.hidden = false;
  const wide = node.offsetWidth, full = u.width;
  node.style.left = `${left + 70 + wide > full ? left + 40 - wide : left + 66}px`;
}

function Media({ runs }) {
  const names = Object.entries(server.value.names).filter(([, a]) => !NUMERIC.has(a.kind) && a.runs > 0).map(([n, a]) => [n, a.kind]);
  return html`<div class="scroll charts-scroll" tabindex="0" role="region" aria-label="Images, sounds, tables, histograms and texts"><${MediaList} names=${names} runs=${runs} /></div>`;
}
