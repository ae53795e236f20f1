// A table of any length: the document contains only the rows and columns that are in view.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { html, useSize } from "./ui.js";

export const ROW = 30;
const PAGE = 100, SPARE = 5;

// Loads the rows for the query `key` in pages. Rows of the last query are shown until the first page has arrived.
export function usePages(key, fetcher, renewed) {
  const box = useRef({ key: null, pages: new Map(), asked: new Set(), first: null });
  const [, draw] = useState(0);
  const wanted = useRef([0, 0]);
  const load = (k, again) => {
    const mine = box.current;
    const name = `${mine.wantedKey}/${k}`;
    if (mine.asked.has(name) && !again) return;
    mine.asked.add(name);
    const asked = mine.wantedKey, turn = (mine.turn = (mine.turn || 0) + 1);
    fetcher(k * PAGE, PAGE).then((answer) => {
      if (asked !== mine.wantedKey) return;
      if (mine.key !== asked) { mine.key = asked; mine.pages = new Map(); }
      if ((mine.pages.get(k)?.turn || 0) > turn) return;
      mine.pages.set(k, { ...answer, turn });
      mine.first = answer; mine.error = null;
      draw((n) => n + 1);
    }, (error) => {
      if (error.name === "AbortError" || asked !== mine.wantedKey) return;
      mine.asked.delete(name); mine.error = error; draw((n) => n + 1);
    });
  };
  useEffect(() => {
    box.current.wantedKey = key; box.current.asked = new Set(); box.current.error = null;
    const [a, b] = wanted.current;
    load(0);
    for (let k = Math.floor(a / PAGE); k <= Math.floor(b / PAGE); k++) if (k > 0 && box.current.first) load(k);
  }, [key]);
  useEffect(() => {
    if (!box.current.first) return;
    const [a, b] = wanted.current;
    box.current.asked = new Set();
    for (let k = Math.floor(a / PAGE); k <= Math.floor(b / PAGE); k++) load(k, true);
  }, [renewed]);
  const mine = box.current;
  return {
    first: mine.first, error: mine.error, key: mine.key,
    row: (i) => mine.pages.get(Math.floor(i / PAGE))?.rows?.[i % PAGE] ?? null,
    page: (i) => mine.pages.get(Math.floor(i / PAGE)),
    see: (a, b) => {
      wanted.current = [a, b];
      if (mine.key === mine.wantedKey) for (let k = Math.floor(a / PAGE); k <= Math.floor(b / PAGE); k++) load(k);
    },
  };
}

export function Grid({ label, count, columns, lead, leadHead, leadWidth = 206, cell, head, rowClass, see, act, move, foot, asked, answered }) {
  const root = useRef();
  const { width, height } = useSize(root);
  const [scroll, setScroll] = useState({ top: 0, left: 0 });
  const [focus, setFocus] = useState(null);
  const lefts = useMemo(() => {
    let at = 0;
    return columns.map((c) => { const here = at; at += c.width; return here; }).concat(at);
  }, [columns]);
  const total = lefts[columns.length];
  const first = Math.max(0, Math.floor(scroll.top / ROW) - SPARE);
  const last = Math.min(count, Math.ceil((scroll.top + height) / ROW) + SPARE);
  useEffect(() => { see?.(first, Math.max(first, last - 1)); }, [first, last, see]);
  let from = 0, to = columns.length;
  if (columns.length > 14) {
    while (from < columns.length && lefts[from + 1] < scroll.left - 100) from++;
    while (to > from + 1 && lefts[to - 1] > scroll.left + width) to--;
  }
  const shown = columns.slice(from, to);
  const rows = [];
  for (let i = first; i < last; i++) rows.push(i);
  useLayoutEffect(() => { if (root.current && scroll.top > count * ROW) root.current.scrollTop = 0; }, [count]);

  const bring = (r, c) => {
    const el = root.current, top = r * ROW;
    if (top < el.scrollTop) el.scrollTop = top;
    else if (top + ROW > el.scrollTop + height - 72) el.scrollTop = top + ROW - height + 72;
    if (c >= 0) {
      if (lefts[c] < el.scrollLeft) el.scrollLeft = lefts[c];
      else if (lefts[c + 1] + leadWidth > el.scrollLeft + width) el.scrollLeft = lefts[c + 1] + leadWidth - width + 16;
    }
  };
  const key = (e) => {
    if (e.target !== root.current) return;
    const at = focus || { r: 0, c: -1 };
    const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageDown: [20, 0], PageUp: [-20, 0], Home: [-1e9, 0], End: [1e9, 0] };
    if (steps[e.key]) {
      const r = Math.max(0, Math.min(count - 1, at.r + (focus ? steps[e.key][0] : 0)));
      const c = Math.max(-1, Math.min(columns.length - 1, at.c + steps[e.key][1]));
      setFocus({ r, c }); bring(r, c); move?.(r, c, e.shiftKey); e.preventDefault();
    } else if ((e.key === "Enter" || e.key === " ") && focus) { act?.(focus.r, focus.c, e.key, e); e.preventDefault(); }
  };
  return html`<div class="grid" role="grid" aria-label=${label} aria-rowcount=${count + 1} aria-colcount=${columns.length + 1} aria-busy=${asked !== answered} data-answered=${answered} tabindex="0" ref=${root}
      aria-activedescendant=${focus ? `cell-${focus.r}-${focus.c}` : undefined} onKeyDown=${key}
      onScroll=${(e) => setScroll({ top: e.currentTarget.scrollTop, left: e.currentTarget.scrollLeft })}>
    <div class="grid-head" role="row" aria-rowindex="1" style=${{ width: `${leadWidth + total}px` }}>
      <div class="lead" role="columnheader" style=${{ width: `${leadWidth}px` }}>${leadHead}</div>
      ${from > 0 && html`<div role="presentation" style=${{ width: `${lefts[from]}px`, flex: "none" }}></div>`}
      ${shown.map((c, k) => head(c, from + k))}
    </div>
    <div class="grid-body" role="rowgroup" style=${{ height: `${count * ROW}px`, width: `${leadWidth + total}px` }}>
      ${rows.map((i) => html`<div key=${i % 512} role="row" aria-rowindex=${i + 2} class=${`row ${rowClass?.(i) || ""}`} style=${{ transform: `translateY(${i * ROW}px)` }}>
        <div id=${`cell-${i}--1`} class=${`lead ${focus?.r === i && focus.c === -1 ? "focus" : ""}`} role="rowheader" style=${{ width: `${leadWidth}px` }}>${lead(i)}</div>
        ${from > 0 && html`<div role="presentation" style=${{ width: `${lefts[from]}px`, flex: "none" }}></div>`}
        ${shown.map((c, k) => cell(i, c, from + k, focus?.r === i && focus.c === from + k, setFocus))}
      </div>`)}
    </div>
    ${foot}
  </div>`;
}
