// Draws scatter plots, parallel coordinates and heat maps on a canvas.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { go, link, revision, route, server, setParams } from "./state.js";
import { isNumeric, titleOf } from "./runs.js";
import { Empty, Select, css, dark, failed, html, many, num, palette, short, useData, useSize } from "./ui.js";

// Colours of the map Cividis, which colour-blind people see in the same order as others.
const STOPS = [[0, 32, 76], [49, 68, 107], [102, 105, 112], [149, 143, 120], [202, 185, 105], [255, 233, 69]];
export function heatColor(share) {
  const at = Math.max(0, Math.min(0.9999, share)) * (STOPS.length - 1), k = Math.floor(at), f = at - k;
  return STOPS[k].map((c, n) => Math.round(c + (STOPS[k + 1][n] - c) * f));
}
const rgb = (c, a = 1) => `rgba(${c[0]},${c[1]},${c[2]},${a})`;

function choices() {
  const s = server.value;
  return [...Object.keys(s.args).map((n) => `arg:${n}`), ...Object.entries(s.names).filter(([, a]) => ["float", "int", "long", "bool"].includes(a.kind) && a.runs > 0).flatMap(([n]) => [`last:${n}`, `max:${n}`, `min:${n}`]), "fact:seconds", "fact:started"];
}
const optionText = (key) => { const [form] = key.split(":"); return ["max", "min", "mean"].includes(form) ? `${titleOf(key)} (${form})` : titleOf(key); };
const firstMetric = () => { const names = Object.entries(server.value.names).filter(([, a]) => ["float", "int"].includes(a.kind) && a.runs > 0); const best = names.find(([n]) => /acc|score|reward/i.test(n)) || names.find(([n]) => /loss/i.test(n)) || names[0]; return best ? `last:${best[0]}` : "fact:seconds"; };
const varied = () => Object.entries(server.value.args).filter(([, a]) => a.distinct > 1).map(([n]) => `arg:${n}`);

function canvas(node, width, height) {
  const scale = devicePixelRatio || 1;
  node.width = width * scale; node.height = height * scale;
  const ctx = node.getContext("2d");
  ctx.scale(scale, scale); ctx.clearRect(0, 0, width, height);
  ctx.font = "11px system-ui, sans-serif";
  return ctx;
}
// Returns about five round numbers from `low` to `high`, for the ticks of an axis.
function roundTicks(low, high) {
  const rough = (high - low) / 5, size = 10 ** Math.floor(Math.log10(rough)), step = size * ([1, 2, 5].find((k) => k * size >= rough * 0.75) || 10);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}
function scaleOf(values, pad = 0) {
  const numbers = values.filter((v) => typeof v === "number");
  if (numbers.length && numbers.length >= values.filter((v) => v !== null).length) {
    let low = Infinity, high = -Infinity;
    for (const v of numbers) { if (v < low) low = v; if (v > high) high = v; }
    if (low === high) { low -= 0.5; high += 0.5; }
    const log = low > 0 && high / low > 100, f = log ? Math.log : (v) => v;
    const extra = pad * (f(high) - f(low)), from = f(low) - extra, to = f(high) + extra;
    const place = (v) => (f(v) - from) / (to - from);
    let ticks = log ? Array.from({ length: 5 }, (_, k) => Math.exp(from + (k / 4) * (to - from))) : roundTicks(from, to);
    if (log) { const tens = []; for (let e = Math.ceil(from / Math.LN10 - 1e-9); e * Math.LN10 <= to + 1e-9; e++) tens.push(10 ** e); if (tens.length > 1) ticks = tens; }
    return { place, ticks: ticks.map((v) => [place(v), num(v, 3)]) };
  }
  const texts = [...new Set(values.filter((v) => v !== null).map(String))].sort();
  return { place: (v) => (texts.length > 1 ? texts.indexOf(String(v)) / (texts.length - 1) : 0.5), ticks: texts.slice(0, 12).map((t, k) => [texts.length > 1 ? k / (texts.length - 1) : 0.5, t]) };
}

export function Scatter({ base }) {
  const p = route.value.params, box = useRef(), node = useRef(), { width, height } = useSize(box);
  const x = p.sx || varied()[0] || "fact:started", y = p.sy || firstMetric(), c = p.sc || "";
  const columns = [x, y, ...(c ? [c] : [])];
  const { data } = useData(JSON.stringify([base, columns, revision.value]), (signal) => api.get("/api/scatter", { q: { ...base, columns } }, signal));
  const rows = useMemo(() => (data?.rows || []).filter((r) => r[1] !== null && r[2] !== null && r[2] !== "NaN"), [data]);
  const [over, setOver] = useState(null), placed = useRef([]);
  useLayoutEffect(() => {
    if (!node.current || width < 50) return;
    const ctx = canvas(node.current, width, height), left = 60, bottom = 40, w = width - left - 24, h = height - bottom - 18;
    const sx = scaleOf(rows.map((r) => r[1]), 0.05), sy = scaleOf(rows.map((r) => r[2]), 0.05), sc = c ? scaleOf(rows.map((r) => r[3])) : null;
    ctx.strokeStyle = css("--line"); ctx.fillStyle = css("--muted");
    for (const [s, text] of sx.ticks) { const px = left + s * w; ctx.beginPath(); ctx.moveTo(px, 14); ctx.lineTo(px, 14 + h); ctx.stroke(); ctx.textAlign = "center"; ctx.fillText(text, px, 14 + h + 16); }
    for (const [s, text] of sy.ticks) { const py = 14 + (1 - s) * h; ctx.beginPath(); ctx.moveTo(left, py); ctx.lineTo(left + w, py); ctx.stroke(); ctx.textAlign = "right"; ctx.fillText(text, left - 6, py + 4); }
    ctx.fillStyle = css("--text"); ctx.textAlign = "right"; ctx.fillText(optionText(x), left + w, height - 8); ctx.textAlign = "left"; ctx.fillText(optionText(y), 6, 10);
    placed.current = rows.map((r) => [left + sx.place(r[1]) * w, 14 + (1 - sy.place(r[2])) * h, r]);
    const radius = rows.length > 3000 ? 2 : rows.length > 400 ? 3 : 4.5;
    for (const [px, py, r] of placed.current) {
      ctx.beginPath(); ctx.arc(px, py, radius, 0, 7);
      ctx.fillStyle = sc && r[3] !== null ? rgb(heatColor(sc.place(r[3])), 0.9) : `${palette()[0]}c0`;
      ctx.fill();
    }
  }, [rows, width, height, dark.value]);
  const near = (e) => {
    const at = node.current.getBoundingClientRect(), mx = e.clientX - at.left, my = e.clientY - at.top;
    let best = null, least = 200;
    for (const one of placed.current) { const d = (one[0] - mx) ** 2 + (one[1] - my) ** 2; if (d < least) { least = d; best = one; } }
    setOver(best);
  };
  const options = choices().map((k) => [k, optionText(k)]);
  return html`<div class="subbar"><span>across</span><${Select} label="Across" value=${x} set=${(v) => setParams({ sx: v })} options=${options} /><span>up</span><${Select} label="Up" value=${y} set=${(v) => setParams({ sy: v })} options=${options} /><span>colour</span><${Select} label="Colour" value=${c} set=${(v) => setParams({ sc: v })} options=${[["", "none"], ...options]} /><span class="muted">${many(rows.length, "run")}</span></div>
    <div class="canvas" ref=${box}><canvas ref=${node} role="img" aria-label=${`${optionText(y)} against ${optionText(x)} of ${many(rows.length, "run")}`} onPointerMove=${near} onPointerLeave=${() => setOver(null)} onClick=${() => over && go(`/run/${over[2][0]}`)}></canvas>
    ${over && html`<div class="tip" style=${{ left: `${Math.min(over[0] + 12, width - 190)}px`, top: `${over[1] - 10}px` }}><div class="at">${short(over[2][0])}</div>${columns.map((k, n) => html`<div><span>${optionText(k)}</span><b>${num(over[2][1 + n])}</b></div>`)}</div>`}</div>`;
}

export function Parallel({ base }) {
  const p = route.value.params, box = useRef(), node = useRef(), { width, height } = useSize(box);
  const by = p.sy || firstMetric(), columns = [...(varied().length ? varied() : ["fact:started"]).slice(0, 8), by];
  const { data } = useData(JSON.stringify([base, columns, revision.value]), (signal) => api.get("/api/scatter", { q: { ...base, columns } }, signal));
  const rows = useMemo(() => (data?.rows || []).filter((r) => r[columns.length] !== null && r[columns.length] !== "NaN"), [data]);
  const [cut, setCut] = useState({}), drag = useRef(null);
  const axes = useMemo(() => columns.map((k, n) => scaleOf(rows.map((r) => r[1 + n]))), [rows]);
  const top = 46, bottom = 26, left = 70, gap = (width - left - 60) / Math.max(1, columns.length - 1), h = height - top - bottom;
  const inside = (r) => Object.entries(cut).every(([n, [a, b]]) => { const s = axes[n].place(r[1 + Number(n)]); return s >= a && s <= b; });
  const kept = rows.filter(inside);
  useLayoutEffect(() => {
    if (!node.current || width < 50) return;
    const ctx = canvas(node.current, width, height), last = axes[axes.length - 1];
    const line = (r) => { ctx.beginPath(); columns.forEach((k, n) => { const px = left + n * gap, v = r[1 + n]; if (v === null) return; const py = top + (1 - axes[n].place(v)) * h; if (n) { const qx = px - gap / 2; ctx.bezierCurveTo(qx, line.y, qx, py, px, py); } else ctx.moveTo(px, py); line.y = py; }); ctx.stroke(); };
    const thin = rows.length > 2000 ? 0.25 : rows.length > 200 ? 0.5 : 0.85;
    ctx.lineWidth = 1; ctx.strokeStyle = css("--line");
    if (kept.length < rows.length) for (const r of rows) line(r);
    ctx.lineWidth = rows.length > 200 ? 1 : 1.6;
    for (const r of kept) { ctx.strokeStyle = rgb(heatColor(dark.value ? 0.25 + 0.75 * last.place(r[columns.length]) : 0.82 * last.place(r[columns.length])), thin); line(r); }
    ctx.textAlign = "center";
    columns.forEach((k, n) => {
      const px = left + n * gap;
      ctx.strokeStyle = css("--muted"); ctx.lineWidth = 1; ctx.beginPath(); ctx.moveTo(px, top); ctx.lineTo(px, top + h); ctx.stroke();
      ctx.fillStyle = css("--text"); ctx.font = "600 12px system-ui, sans-serif"; ctx.fillText(optionText(k), px, 22);
      ctx.font = "11px system-ui, sans-serif"; ctx.fillStyle = css("--muted");
      ctx.lineJoin = "round"; ctx.lineWidth = 4; ctx.strokeStyle = css("--panel");
      ctx.textAlign = "right";
      for (const [s, text] of axes[n].ticks) { const py = top + (1 - s) * h + 4; ctx.strokeText(text, px - 6, py); ctx.fillText(text, px - 6, py); }
      ctx.textAlign = "center";
      if (cut[n]) { ctx.fillStyle = `${palette()[0]}40`; ctx.fillRect(px - 8, top + (1 - cut[n][1]) * h, 16, (cut[n][1] - cut[n][0]) * h); }
    });
  }, [rows, width, height, cut, dark.value]);
  const at = (e) => { const b = node.current.getBoundingClientRect(); return [Math.round((e.clientX - b.left - left) / gap), 1 - (e.clientY - b.top - top) / h, e]; };
  const down = (e) => { const [n, s] = at(e); if (n >= 0 && n < columns.length) { drag.current = [n, s]; node.current.setPointerCapture(e.pointerId); } };
  const moved = (e) => { if (!drag.current) return; const [, s] = at(e), [n, from] = drag.current; setCut({ ...cut, [n]: [Math.min(from, s), Math.max(from, s)] }); };
  const up = (e) => { if (!drag.current) return; const [, s] = at(e), [n, from] = drag.current; drag.current = null; if (Math.abs(s - from) < 0.01) { const now = { ...cut }; delete now[n]; setCut(now); } };
  return html`<div class="subbar"><span>coloured by</span><${Select} label="Result" value=${by} set=${(v) => setParams({ sy: v })} options=${choices().map((k) => [k, optionText(k)])} /><span class="muted">${kept.length === rows.length ? many(rows.length, "run") : `${kept.length} of ${many(rows.length, "run")}`}; drag along an axis to choose</span>
      ${kept.length < rows.length && html`<button type="button" class="button" onClick=${() => go("/runs", { runs: kept.slice(0, 500).map((r) => r[0]).join(",") })}>Show in the table</button>`}</div>
    <div class="canvas" ref=${box}><canvas ref=${node} role="img" aria-label=${`Parallel coordinates of ${many(rows.length, "run")}`} onPointerDown=${down} onPointerMove=${moved} onPointerUp=${up}></canvas></div>`;
}

export function Heat({ name, runs }) {
  return html`<section class="mediasection"><h2 class="section">${name}<small>histogram over the loop</small></h2><div class="charts">${runs.map((run) => html`<${HeatOne} key=${run} name=${name} run=${run} />`)}</div></section>`;
}
function HeatOne({ name, run }) {
  const box = useRef(), node = useRef(), { width } = useSize(box), height = 200;
  const [seen, setSeen] = useState(false);
  useEffect(() => { const w = new IntersectionObserver(([e]) => e.isIntersecting && setSeen(true), { rootMargin: "200px" }); w.observe(box.current); return () => w.disconnect(); }, []);
  const { data } = useData(seen ? `${name}/${run}/${revision.value}` : null, (signal) => api.get("/api/heat", { name, run }, signal));
  useLayoutEffect(() => {
    if (!data || !data.x.length || width < 50) return;
    const ctx = canvas(node.current, width, height), left = 52, bottom = 24, w = width - left - 10, h = height - bottom - 8, n = data.x.length, bins = data.counts[0].length;
    let most = 0;
    for (const column of data.counts) for (const v of column) if (v > most) most = v;
    data.counts.forEach((column, i) => column.forEach((v, k) => {
      ctx.fillStyle = v ? rgb(heatColor(Math.sqrt(v / most))) : css("--soft");
      ctx.fillRect(left + (i * w) / n, 8 + ((bins - 1 - k) * h) / bins, w / n + 0.6, h / bins + 0.6);
    }));
    ctx.fillStyle = css("--muted");
    ctx.textAlign = "right";
    for (const s of [0, 0.5, 1]) ctx.fillText(num(data.edges[0] + s * (data.edges[bins] - data.edges[0]), 3), left - 6, 8 + (1 - s) * h + (s === 1 ? 8 : s === 0 ? 0 : 4));
    ctx.textAlign = "center";
    for (const s of [0, 0.5, 1]) ctx.fillText(num(data.x[Math.round(s * (n - 1))]), left + w * (0.02 + 0.96 * s), height - 8);
  }, [data, width, dark.value]);
  return html`<figure class="chart" ref=${box} style=${{ minHeight: "238px" }}><figcaption><a class="title" href=${link(`/run/${run}`)}>${short(run)}</a></figcaption><canvas ref=${node} style=${{ width: "100%", height: `${height}px` }} role="img" aria-label=${`Histograms of ${name} in run ${run}`}></canvas>${data && !data.x.length ? html`<p class="nothing">none in this run</p>` : ""}</figure>`;
}
