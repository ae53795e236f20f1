// Shows logged values that are not numbers: images, sounds, tables, confusion matrices, texts.
import { useEffect, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { Heat } from "./pictures.js";
import { link, revision } from "./state.js";
import { Empty, dark, failed, html, many, num, short, useData } from "./ui.js";

export const MEDIA = new Set(["image", "audio", "table", "confusion", "text", "histogram", "str", "repr", "json", "array", "tensor"]);
const KINDS = { audio: "audio", table: "table", confusion: "confusion matrix", str: "text", repr: "text", json: "JSON" };

// Shows one section per name: a heat map for histograms, for other values a slider to choose the point.
export function MediaList({ names, runs, alone }) {
  if (!names.length) return html`<${Empty} title="No images, sounds, tables or texts were logged">
    <p>Each of these logs one:</p><ul><li><code>rearview.log("confusion", figure)</code></li><li><code>rearview.log("speech", rearview.media.Audio(samples, rate=16000))</code></li><li><code>rearview.log("errors", dataframe)</code></li><li><code>rearview.log("weights", numpy.histogram(w))</code></li></ul></${Empty}>`;
  return names.map(([name, kind]) => (kind === "histogram" ? html`<${Heat} key=${name} name=${name} runs=${runs.slice(0, 6)} />` : html`<${Gallery} key=${name} name=${name} runs=${runs.slice(0, 12)} kind=${kind} alone=${alone} />`));
}

function Gallery({ name, runs, kind, alone }) {
  const { data } = useData(`${name}/${runs}/${revision.value}`, (signal) => api.get("/api/media", { name, runs: runs.join(",") }, signal));
  const all = data || [], points = [...new Set(all.map((m) => m.point))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const [at, setAt] = useState(null);
  const point = at !== null && points[at] !== undefined ? points[at] : points[points.length - 1];
  const shown = runs.map((r) => all.find((m) => m.run === r && m.point === point)).filter(Boolean);
  return html`<section class="mediasection" aria-label=${name}><h2 class="section">${name}<small>${KINDS[kind] || kind}</small></h2>
    ${points.length > 1 && html`<label class="slider wide"><span>${point}</span><input type="range" min="0" max=${points.length - 1} value=${at ?? points.length - 1} aria-label=${`Point of ${name}`} aria-valuetext=${point} onInput=${(e) => setAt(Number(e.currentTarget.value))} /></label>`}
    ${data && !shown.length && html`<p class="nothing">none in these runs</p>`}
    <div class="gallery">${shown.map((m) => html`<figure key=${m.run}><${Medium} value=${m} label=${`${name} of run ${m.run} at ${m.point || "the end"}`} />${!alone && html`<figcaption><a href=${link(`/run/${m.run}`)}>${short(m.run)}</a></figcaption>`}</figure>`)}</div></section>`;
}

export function Medium({ value: m, label }) {
  if (m.oid && m.kind === "image") return html`<${Picture} oid=${m.oid} alt=${label} />`;
  if (m.oid && m.kind === "audio") return html`<${Sound} oid=${m.oid} label=${label} about=${m.text} />`;
  if (m.oid && ["table", "confusion", "text"].includes(m.kind)) return html`<${Content} oid=${m.oid} label=${label} />`;
  return html`<pre class="text" tabindex="0">${m.text}</pre>`;
}

function useAddress(load, oid) {
  const [url, setUrl] = useState(null);
  useEffect(() => { let on = true; load(oid).then((u) => on && setUrl(u), failed); return () => { on = false; }; }, [oid]);
  return url;
}
function Picture({ oid, alt }) {
  const url = useAddress(api.picture, oid);
  return url ? html`<img src=${url} alt=${alt} />` : html`<span class="ghost picture"></span>`;
}
function Sound({ oid, label, about }) {
  const url = useAddress(api.sound, oid);
  return html`<div class="sound"><audio controls preload="metadata" aria-label=${label} src=${url || undefined}></audio><small>${about}</small></div>`;
}
function Content({ oid, label }) {
  const { data, error } = useData(oid, (signal) => api.get(`/api/content/${oid}`, {}, signal));
  if (error) return html`<p class="nothing">${error.message}</p>`;
  if (!data) return html`<span class="ghost picture"></span>`;
  if (data.kind === "text") return html`<pre class="text" tabindex="0" aria-label=${label}>${data.text}${data.total > data.text.length ? "…" : ""}</pre>`;
  const matrix = data.kind === "confusion", most = matrix ? Math.max(1, ...data.rows.flat()) : 1;
  const shade = (v) => (matrix && v ? { background: dark.value ? `rgba(74,168,224,${0.08 + (0.45 * v) / most})` : `rgba(0,114,178,${0.05 + (0.35 * v) / most})` } : undefined);
  return html`<div class="datatable" tabindex="0" role="region" aria-label=${label}><table class="plain"><thead><tr>${matrix && html`<th><small>true ↓ predicted →</small></th>`}${data.columns.map((c, k) => html`<th key=${k} class=${matrix || typeof data.rows[0]?.[k] === "number" ? "right" : ""}>${c}</th>`)}</tr></thead>
    <tbody>${data.rows.map((row, i) => html`<tr key=${i}>${matrix && html`<th scope="row">${data.columns[i]}</th>`}${row.map((v, k) => html`<td key=${k} class=${typeof v === "number" ? "right" : ""} style=${shade(v)} title=${typeof v === "number" ? v : undefined}>${v === null ? html`<span class="none">–</span>` : typeof v === "number" ? num(v) : String(v)}</td>`)}</tr>`)}</tbody></table>
    ${data.total > data.rows.length && html`<small class="muted">the first ${many(data.rows.length, "row")} of ${data.total.toLocaleString("en")}</small>`}</div>`;
}
