// Functions and components that every screen uses: number formats, icons, menus, dialogs, messages.
import { h, Fragment } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import { signal } from "./vendor/signals.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { Fragment };

// Colours by Okabe and Ito, which colour-blind people can tell apart; after eight lines, dashes distinguish lines.
const LIGHT = ["#0072b2", "#d55e00", "#00825f", "#b8578f", "#8a6d00", "#2a8fc9", "#6b3fa0", "#5c6370"];
const DARK = ["#4aa8e0", "#ff8a3d", "#2fc79a", "#e39ac6", "#e6c84a", "#8ecbf2", "#b79af0", "#a9b1bd"];
export const dark = signal(document.documentElement.dataset.theme === "dark");
export const palette = () => (dark.value ? DARK : LIGHT);
export const colorOf = (k) => palette()[k % 8];
export const dashOf = (k) => [[], [6, 3], [2, 3], [8, 3, 2, 3]][Math.floor(k / 8) % 4];
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function setTheme(isDark) {
  dark.value = isDark;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  try { localStorage.setItem("rearview.theme", isDark ? "dark" : "light"); } catch { /* not kept */ }
}

export function num(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.9995) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return minutes < 1440 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}
export function size(bytes) {
  if (!bytes) return "0 B";
  const k = Math.min(5, Math.floor(Math.log10(bytes) / 3));
  return k ? `${(bytes / 1000 ** k).toFixed(1)} ${["B", "kB", "MB", "GB", "TB", "PB"][k]}` : `${bytes} B`;
}
export const many = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
export function moment(seconds, full) {
  if (!seconds) return "";
  const then = new Date(seconds * 1000), pad = (n) => String(n).padStart(2, "0");
  const time = `${pad(then.getHours())}:${pad(then.getMinutes())}`;
  const day = then.toLocaleDateString("en", { month: "short", day: "numeric", year: full ? "numeric" : undefined });
  return full ? `${day}, ${time}:${pad(then.getSeconds())}` : `${day} ${time}`;
}
export const short = (run) => (run || "").replace(/^\d{4}(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)-/, "$1$2-$3$4$5-");

const PATHS = {
  runs: "M3 5h14M3 10h14M3 15h14M8 3v14",
  charts: "M3 16V4M3 16h14M6 12l3-4 3 2 4-6",
  versions: "M6 5v10M6 7a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM6 17a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM14 9a2 2 0 1 0 0-4 2 2 0 0 0 0 4ZM14 9c0 4-8 2-8 5",
  replay: "M4 10a6 6 0 1 0 2-4.5M4 3v4h4",
  live: "M10 10h.01M6.5 13.5a5 5 0 0 1 0-7M13.5 6.5a5 5 0 0 1 0 7M4 16a8.5 8.5 0 0 1 0-12M16 4a8.5 8.5 0 0 1 0 12",
  search: "M9 15A6 6 0 1 0 9 3a6 6 0 0 0 0 12ZM17 17l-3.8-3.8",
  columns: "M4 4h12v12H4zM8 4v12M12 4v12",
  group: "M4 5h12M7 10h9M10 15h6",
  sun: "M10 13.5a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7ZM10 2v2M10 16v2M2 10h2M16 10h2M4.3 4.3l1.4 1.4M14.3 14.3l1.4 1.4M4.3 15.7l1.4-1.4M14.3 5.7l1.4-1.4",
  moon: "M16 11.5A6.5 6.5 0 0 1 8.5 4 6.5 6.5 0 1 0 16 11.5Z",
  keys: "M2 6h16v9H2zM5 9h.01M8 9h.01M11 9h.01M14 9h.01M6 12h8",
  close: "M5 5l10 10M15 5L5 15",
  down: "M6 8l4 4 4-4",
  right: "M8 6l4 4-4 4",
  pin: "M10 12v6M6 12h8l-1.5-3V4h-5v5z",
  play: "M6 4l10 6-10 6z",
  stop: "M6 6h8v8H6z",
  copy: "M7 7h9v9H7zM4 13V4h9",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  fill: "M10 3v14M3 10h14",
  check: "M4 10.5l4 4 8-9",
  tag: "M3 3h7l7 7-7 7-7-7zM7 7h.01",
  sortup: "M10 15V5M6 9l4-4 4 4",
  sortdown: "M10 5v10M6 11l4 4 4-4",
};
export const Icon = ({ name, size: s = 16 }) => html`<svg class="icon" width=${s} height=${s} viewBox="0 0 20 20" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;

export const Button = ({ icon, children, label, kind = "", ...rest }) =>
  html`<button type="button" class=${`button ${kind}`} aria-label=${label} title=${label} ...${rest}>${icon && html`<${Icon} name=${icon} />`}${children}</button>`;

// A button that opens a panel; the Escape key or a click outside closes the panel.
export function Popover({ icon, text, label, align = "left", wide, children, active, kind = "" }) {
  const [open, setOpen] = useState(false), root = useRef();
  useEffect(() => {
    if (!open) return;
    const away = (e) => { if (!root.current.contains(e.target)) setOpen(false); };
    const key = (e) => { if (e.key === "Escape") { setOpen(false); root.current.querySelector("button").focus(); e.stopPropagation(); } };
    document.addEventListener("pointerdown", away, true);
    document.addEventListener("keydown", key, true);
    const first = root.current.querySelector(".panel input, .panel button");
    first?.focus();
    return () => { document.removeEventListener("pointerdown", away, true); document.removeEventListener("keydown", key, true); };
  }, [open]);
  return html`<div class="popover" ref=${root}>
    <button type="button" class=${`button ${kind} ${active ? "on" : ""}`} aria-haspopup="true" aria-expanded=${open} aria-label=${label} title=${label} onClick=${() => setOpen(!open)}>
      ${icon && html`<${Icon} name=${icon} />`}${text}</button>
    ${open && html`<div class=${`panel ${align} ${wide ? "wide" : ""}`}>${typeof children === "function" ? children(() => setOpen(false)) : children}</div>`}
  </div>`;
}

export const Menu = ({ items, close }) => html`<div class="menu" role="menu">
  ${items.map((one) => one === "-" ? html`<hr />` : html`<button type="button" role="menuitem" class="item" disabled=${one.disabled} onClick=${() => { close(); one.act(); }}>
    ${one.icon && html`<${Icon} name=${one.icon} />`}<span>${one.text}</span>${one.hint && html`<kbd>${one.hint}</kbd>`}</button>`)}
</div>`;

export function Dialog({ title, close, children, wide }) {
  const box = useRef();
  useLayoutEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${box} class=${wide ? "wide" : ""} aria-label=${title} onClose=${close} onClick=${(e) => e.target === box.current && close()}>
    <header><h2>${title}</h2><${Button} icon="close" label="Close" kind="quiet" onClick=${close} /></header>
    <div class="body">${children}</div></dialog>`;
}

export const messages = signal([]);
let next = 0;
export function say(text, kind = "note") {
  const one = { id: next++, text, kind };
  messages.value = [...messages.value.slice(-3), one];
  setTimeout(() => (messages.value = messages.value.filter((m) => m !== one)), kind === "error" ? 9000 : 3500);
}
export const Messages = () => html`<div class="messages" role="status" aria-live="polite">
  ${messages.value.map((m) => html`<div key=${m.id} class=${`message ${m.kind}`}>${m.text}</div>`)}</div>`;
export const failed = (error) => { if (error?.name !== "AbortError") say(error.message || String(error), "error"); };

export async function copy(text, what = "Copied") {
  try { await navigator.clipboard.writeText(text); say(what); } catch {
    const box = document.createElement("textarea");
    box.value = text; document.body.append(box); box.select();
    document.execCommand("copy"); box.remove(); say(what);
  }
}

export const Status = ({ status }) => html`<span class=${`status ${status}`}>${status}</span>`;
export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2>${children}</div>`;
export const Code = ({ children }) => html`<button type="button" class="code" title="Copy" onClick=${() => copy(children)}><code>${children}</code><${Icon} name="copy" size=${14} /></button>`;
export const Loading = () => html`<div class="loading" role="status"><span class="dot"></span>reading</div>`;
export const Toggle = ({ on, set, children, label }) => html`<label class="toggle"><input type="checkbox" checked=${on} aria-label=${label} onChange=${(e) => set(e.currentTarget.checked)} /><span>${children}</span></label>`;
export const Select = ({ value, set, options, label }) => html`<select class="select" aria-label=${label} value=${value} onChange=${(e) => set(e.currentTarget.value)}>
  ${options.map(([v, text]) => html`<option value=${v} selected=${v === value}>${text}</option>`)}</select>`;

// Calls `fetcher` whenever `key` changes; returns the old data until the new data arrive.
export function useData(key, fetcher) {
  const [state, set] = useState({ data: null, error: null });
  useEffect(() => {
    if (key === null) return;
    const stop = new AbortController();
    fetcher(stop.signal).then((data) => !stop.signal.aborted && set({ data, error: null, key }),
      (error) => error.name !== "AbortError" && !stop.signal.aborted && set((old) => ({ data: old.data, error })));
    return () => stop.abort();
  }, [key]);
  return state;
}

export function useSize(ref) {
  const [box, set] = useState({ width: 0, height: 0 });
  useLayoutEffect(() => {
    const measure = () => { const r = ref.current.getBoundingClientRect(); set((o) => (o.width === r.width && o.height === r.height ? o : { width: r.width, height: r.height })); };
    const watch = new ResizeObserver(measure);
    watch.observe(ref.current);
    measure();
    return () => watch.disconnect();
  }, []);
  return box;
}
