// The screen with the table of runs: its filter, its columns, and empty cells that a backfill can fill.
import { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { signal } from "./vendor/signals.js";
import * as api from "./api.js";
import { Grid, usePages } from "./grid.js";
import { PlanPanel } from "./plan.js";
import { flying, go, jobs, link, pinned, picked, revision, route, server, setParams, shared } from "./state.js";
import { Button, Code, Dialog, Empty, Icon, Menu, Popover, Status, Toggle, colorOf, copy, dark, failed, html, many, moment, num, say, short, span } from "./ui.js";

const FACTS = { status: "status", started: "started", seconds: "took", tags: "tags", note: "note", version: "version", script: "script", command: "command", host: "host", exit_code: "exit code", parent: "parent", replays: "replays" };
const NUMERIC = new Set(["float", "int", "long", "bool"]);
const FORMS = [["last", "last value"], ["max", "highest"], ["min", "lowest"], ["mean", "mean"], ["count", "how many"]];

export const cells = signal({}); // empty cells that the user has selected to fill: {name: Set of runs}
export const prices = signal({}); // estimated cost to fill an empty cell: {name: {run: price}}
export const planning = signal(null); // the backfill request whose plan is shown
const tinted = signal({}); // keys of the columns whose cells are coloured by value
const editing = signal(null);

export function parts(key) { const at = key.indexOf(":"); return [key.slice(0, at), key.slice(at + 1)]; }
export const isNumeric = (key) => {
  const [form, name] = parts(key), s = server.value;
  if (form === "fact") return ["started", "seconds", "exit_code", "replays"].includes(name);
  if (form === "arg") return !!s.args[name]?.numeric;
  return form !== "last" || NUMERIC.has(s.names[name]?.kind);
};
export const fillable = (key) => { const [form, name] = parts(key); return form !== "fact" && form !== "arg" && server.value.virtual.includes(name); };
export const titleOf = (key) => { const [form, name] = parts(key); return form === "fact" ? FACTS[name] || name : name; };

export function defaultColumns() {
  const s = server.value;
  const args = Object.entries(s.args), varied = args.filter(([, a]) => a.distinct > 1);
  const names = Object.entries(s.names);
  const empty = names.filter(([n, a]) => s.virtual.includes(n) && a.runs < s.runs).map(([n]) => n);
  const full = names.filter(([n, a]) => NUMERIC.has(a.kind) && !empty.includes(n)).sort((a, b) => (b[1].asked ? 1 : 0) - (a[1].asked ? 1 : 0) || b[1].runs - a[1].runs || a[1].path.split("/").length - b[1].path.split("/").length);
  const things = names.filter(([n, a]) => a.kind === "image" && !empty.includes(n)).slice(0, 1);
  const first = full.map(([n]) => `last:${n}`), most = empty.length ? 4 : 8;
  return [...(varied.length ? varied : args).slice(0, 5).map(([n]) => `arg:${n}`), ...first.slice(0, most),
    ...empty.slice(0, 6).map((n) => `last:${n}`), ...first.slice(most, most + 4), ...things.map(([n]) => `last:${n}`), "fact:seconds", "fact:started", "fact:tags", "fact:note"];
}
export function columnKeys() {
  const kept = route.value.params.cols;
  return kept ? kept.split(",").map(decodeURIComponent) : defaultColumns();
}
const setColumns = (keys) => setParams({ cols: keys.map(encodeURIComponent).join(",") });
export function sorts() {
  const text = route.value.params.sort;
  return text ? text.split(",").map((t) => ({ key: decodeURIComponent(t.replace(/^-/, "")), desc: t.startsWith("-") })) : [];
}
function sortBy(key, desc) { setParams({ sort: `${desc ? "-" : ""}${encodeURIComponent(key)}` }); }
export function groups() { return (route.value.params.group || "").split(",").filter(Boolean).map(decodeURIComponent); }
export function baseQuery() {
  const p = route.value.params;
  return { where: p.where || "", search: p.search || "", sort: sorts(), ...(p.runs ? { runs: p.runs.split(",") } : {}) };
}

const widthOf = (key) => {
  const [form, name] = parts(key);
  if (form === "fact") return { status: 96, started: 118, seconds: 84, tags: 150, note: 180, version: 96, command: 320, script: 120 }[name] || 110;
  return Math.max(form === "arg" ? 76 : 88, Math.min(190, 38 + 8 * name.length));
};

export function Runs() {
  const s = server.value;
  const keys = columnKeys(), grouped = groups(), base = baseQuery();
  const [live, setLive] = useState(false);
  useEffect(() => { cells.value = {}; }, [base.where]);
  if (!s.runs && !s.pending) return html`<${NoRuns} />`;
  return html`<section class="screen runs" aria-label="Runs and columns">
    <${Toolbar} keys=${keys} grouped=${grouped} />
    <div class="split">
      <div class="main">${grouped.length ? html`<${GroupTable} keys=${keys} grouped=${grouped} base=${base} />` : html`<${RunTable} keys=${keys} base=${base} />`}<${ActionBar} keys=${keys} base=${base} /></div>
      ${planning.value && html`<${PlanPanel} ask=${planning.value} close=${() => (planning.value = null)} />`}
    </div>
    ${editing.value && html`<${Edit} what=${editing.value} close=${() => (editing.value = null)} />`}
  </section>`;
}

const NoRuns = () => html`<${Empty} title="No run has been recorded here yet">
  <p>Record one. The script needs no changes:</p><${Code}>rearview run train.py</${Code}>
  <p>It appears here while it trains. Later, add a log statement to <code>train.py</code>, and fill its column for every past run.</p>
</${Empty}>`;

function Toolbar({ keys, grouped }) {
  const p = route.value.params, s = server.value;
  const shownTotal = total.value;
  return html`<div class="toolbar">
    <label class="field search"><${Icon} name="search" /><input id="search" type="search" placeholder="Search runs" aria-label="Search runs" value=${p.search || ""}
      onInput=${later((e) => setParams({ search: e.target.value }))} /></label>
    <${SqlBox} value=${p.where || ""} />
    <${Popover} icon="group" label="Group runs" text=${grouped.length ? html`<span>Grouped</span>` : html`<span>Group</span>`} active=${grouped.length}>${(close) => html`<${GroupMenu} grouped=${grouped} close=${close} />`}</${Popover}>
    <${Popover} icon="columns" label="Choose columns" text=${html`<span>Columns</span>`} wide>${() => html`<${Chooser} keys=${keys} />`}</${Popover}>
    <${Popover} icon="copy" label="Copy or export" text=${html`<span>Export</span>`} align="right">${(close) => html`<${Menu} close=${close} items=${exports_(keys)} />`}</${Popover}>
    <span class="spacer"></span>
    ${(p.runs || p.where || p.search) && html`<button type="button" class="button quiet" onClick=${() => setParams({ runs: "", where: "", search: "" })}>Clear filter</button>`}
    <span class="count" aria-live="polite">${shownTotal === null ? "" : shownTotal === s.runs ? many(s.runs, "run") : `${shownTotal.toLocaleString("en")} of ${many(s.runs, "run")}`}${s.pending ? `, reading ${s.pending.toLocaleString("en")} more` : ""}</span>
  </div>`;
}
const total = signal(null);

let waiting = null;
export const later = (f, ms = 160) => (e) => { clearTimeout(waiting); const t = { target: { value: e.target.value } }; waiting = setTimeout(() => f(t), ms); };

// The input for the SQL filter, with completion of column names.
export function SqlBox({ value }) {
  const [text, setText] = useState(value), [hints, setHints] = useState([]), [at, setAt] = useState(0), [open, setOpen] = useState(false);
  const box = useRef(), wrong = filterError.value;
  useEffect(() => setText(value), [value]);
  const complete = async (now) => {
    const upto = now.slice(0, box.current.selectionStart);
    try { setHints(await api.get("/api/complete", { text: upto })); setAt(0); setOpen(true); } catch { setHints([]); }
  };
  const take = (hint) => {
    const end = box.current.selectionStart, begin = text.slice(0, end).search(/[^\s()<>=!,+*']*$/);
    const now = `${text.slice(0, begin)}${hint.insert} ${text.slice(end)}`;
    setText(now); setOpen(false);
    box.current.focus();
  };
  const key = (e) => {
    if (open && hints.length && (e.key === "ArrowDown" || e.key === "ArrowUp")) { setAt((at + (e.key === "ArrowDown" ? 1 : hints.length - 1)) % hints.length); e.preventDefault(); }
    else if (open && hints.length && e.key === "Tab") { take(hints[at]); e.preventDefault(); }
    else if (e.key === "Escape") setOpen(false);
    else if (e.key === "Enter") { setOpen(false); setParams({ where: text.trim() }); }
  };
  return html`<div class=${`field sql ${wrong ? "wrong" : ""}`}>
    <span class="prefix" aria-hidden="true">where</span>
    <input id="where" ref=${box} type="text" spellcheck="false" autocomplete="off" aria-label="Filter in SQL" role="combobox" aria-expanded=${open && hints.length > 0} aria-controls="hints"
      aria-activedescendant=${open && hints.length ? `hint-${at}` : undefined} aria-invalid=${!!wrong} placeholder="lr < 0.1 and acc > 0.9" value=${text}
      onInput=${(e) => { setText(e.target.value); complete(e.target.value); }} onFocus=${() => !text && complete("")} onBlur=${() => setTimeout(() => setOpen(false), 150)} onKeyDown=${key} />
    ${value && html`<${Button} icon="close" kind="quiet small" label="Clear the filter" onClick=${() => { setText(""); setParams({ where: "" }); }} />`}
    ${open && hints.length > 0 && html`<ul id="hints" class="hints" role="listbox" aria-label="Completions">
      ${hints.map((hint, k) => html`<li id=${`hint-${k}`} role="option" aria-selected=${k === at} class=${k === at ? "on" : ""} onPointerDown=${(e) => { e.preventDefault(); take(hint); }}><span>${hint.label}</span><small>${hint.what}</small></li>`)}
      <li class="tip" role="presentation"><kbd>Tab</kbd> takes it, <kbd>Enter</kbd> filters</li></ul>`}
    ${wrong && html`<div class="wrongly" role="alert">${wrong}</div>`}
  </div>`;
}
export const filterError = signal("");

function GroupMenu({ grouped, close }) {
  const s = server.value;
  const args = Object.entries(s.args).filter(([, a]) => a.distinct > 1).map(([n]) => n);
  const seed = args.find((n) => /seed/i.test(n));
  const set = (keys) => { setParams({ group: keys.map(encodeURIComponent).join(",") }); };
  const other = args.filter((n) => n !== seed).map((n) => `arg:${n}`);
  return html`<div class="form">
    ${seed && html`<button type="button" class="item" onClick=${() => { set(other); close(); }}><${Icon} name="group" /><span>All but <b>${seed}</b>: mean and band over seeds</span></button>`}
    ${[...args.map((n) => `arg:${n}`), "fact:status", "fact:version", "fact:script"].map((key) => html`<${Toggle} on=${grouped.includes(key)} set=${(on) => set(on ? [...grouped, key] : grouped.filter((k) => k !== key))}>${titleOf(key)}</${Toggle}>`)}
    ${grouped.length > 0 && html`<button type="button" class="item" onClick=${() => { set([]); close(); }}><${Icon} name="close" /><span>No groups</span></button>`}
  </div>`;
}

function Chooser({ keys }) {
  const [search, setSearch] = useState(""), s = server.value;
  const sections = [
    ["Parameters", Object.keys(s.args).map((n) => `arg:${n}`)],
    ["Logged", Object.keys(s.names).map((n) => `last:${n}`)],
    ["Facts", Object.keys(FACTS).map((n) => `fact:${n}`)],
  ];
  const has = (key) => { const [form, name] = parts(key); return keys.some((k) => { const [f, n] = parts(k); return n === name && (form === "last" ? !["arg", "fact"].includes(f) : f === form); }); };
  const flip = (key, on) => { const [form, name] = parts(key); setColumns(on ? [...keys, key] : keys.filter((k) => { const [f, n] = parts(k); return !(n === name && (form === "last" ? !["arg", "fact"].includes(f) : f === form)); })); };
  return html`<div class="form chooser">
    <label class="field"><${Icon} name="search" /><input type="search" placeholder="Find a column" aria-label="Find a column" onInput=${(e) => setSearch(e.currentTarget.value.toLowerCase())} /></label>
    <div class="scroll">${sections.map(([title, all]) => {
      const found = all.filter((k) => titleOf(k).toLowerCase().includes(search)), some = found.slice(0, 200);
      return some.length > 0 && html`<h3>${title}</h3>${some.map((key) => html`<${Toggle} on=${has(key)} set=${(on) => flip(key, on)}>${titleOf(key)}${fillable(key) && s.names[parts(key)[1]].runs < s.runs ? html` <small class="hint">can be filled</small>` : ""}</${Toggle}>`)}${found.length > some.length && html`<p class="tip">${found.length - some.length} more; type to find them</p>`}`;
    })}</div>
    <button type="button" class="item" onClick=${() => setParams({ cols: "" })}><${Icon} name="replay" /><span>The usual columns</span></button>
  </div>`;
}

const ident = (name) => (/^[A-Za-z_]\w*$/.test(name) ? name : `"${name.replaceAll('"', '""')}"`);
function exports_(keys) {
  const p = route.value.params, names = keys.map(parts).filter(([f]) => !["fact", "arg"].includes(f)).map(([, n]) => n);
  const where = p.where ? `, where=${JSON.stringify(p.where)}` : "";
  const q = { ...baseQuery(), columns: keys };
  return [
    { text: "Copy as pandas", icon: "copy", act: () => copy(`import rearview\n\npast = rearview.history()\nruns = [run.id for run in past.runs(${where ? `where=${JSON.stringify(p.where)}` : ""})]\ndf = past.table(${names.map((n) => JSON.stringify(n)).join(", ")}, runs=runs).pandas()\n`, "Copied the pandas code") },
    { text: "Copy as SQL", icon: "copy", act: () => copy(`SELECT run, ${names.map((n) => `last(${ident(n)}) AS ${ident(n)}`).join(", ")}\nFROM full_pivot${p.where ? `\nWHERE ${p.where}` : ""}\nGROUP BY run`, "Copied the SQL") },
    { text: "Copy as Markdown", icon: "copy", act: async () => {
      try {
        const { rows } = await api.get("/api/table", { q: { ...q, limit: 200 } });
        const line = (cells_) => `| ${cells_.map((c) => String(Array.isArray(c) ? c.join(", ") : typeof c === "number" ? num(c) : c ?? "").replaceAll("|", "\\|")).join(" | ")} |`;
        copy([line(["run", ...keys.map(titleOf)]), `|${"---|".repeat(keys.length + 1)}`, ...rows.map(line)].join("\n"), `Copied ${many(rows.length, "row")}`);
      } catch (e) { failed(e); }
    } },
    { text: "Copy the link to this view", icon: "copy", act: () => copy(location.href, "Copied the link") },
    "-",
    { text: "Download CSV", icon: "sortdown", disabled: !!api.snapshot(), act: () => api.download("/api/export.csv", { q }, `${server.value.project}.csv`).catch(failed) },
  ];
}

function tint(key, value, ranges) {
  if (!tinted.value[key] || typeof value !== "number") return undefined;
  const [low, high] = ranges?.[key] || [];
  if (low === undefined || low === null || !(high > low)) return undefined;
  const share = (value - low) / (high - low);
  return { background: dark.value ? `rgba(74,168,224,${0.05 + 0.5 * share})` : `rgba(0,114,178,${0.04 + 0.36 * share})` };
}

function useHead(keys) {
  const order = sorts()[0];
  return useCallback((c) => {
    const [form, name] = parts(c.key), on = order?.key === c.key;
    const about = server.value.names[name];
    const flip = () => (on ? (order.desc ? setParams({ sort: "" }) : sortBy(c.key, true)) : sortBy(c.key, isNumeric(c.key) && form !== "arg"));
    return html`<div key=${c.key} role="columnheader" aria-sort=${on ? (order.desc ? "descending" : "ascending") : "none"} class=${`cell head ${isNumeric(c.key) ? "right" : ""} ${c.lacks ? "canfill" : ""}`} style=${{ width: `${c.width}px` }}>
      <button type="button" class="sort" title=${`Sort by ${titleOf(c.key)}`} onClick=${flip}><span class="name">${titleOf(c.key)}</span>${!["fact", "arg"].includes(form) && form !== "last" ? html`<small>${form}</small>` : ""}${on && html`<${Icon} name=${order.desc ? "sortdown" : "sortup"} size=${12} />`}</button>
      <${Popover} icon="down" kind="quiet tiny" label=${`Menu of ${titleOf(c.key)}`} align="right">${(close) => html`<${Menu} close=${close} items=${[
        { text: "Sort rising", icon: "sortup", act: () => sortBy(c.key, false) },
        { text: "Sort falling", icon: "sortdown", act: () => sortBy(c.key, true) },
        ...(!["fact", "arg"].includes(form) && NUMERIC.has(about?.kind) ? ["-", ...FORMS.map(([f, text]) => ({ text: `Show the ${text}`, icon: f === form ? "check" : undefined, act: () => setColumns(keys.map((k) => (k === c.key ? `${f}:${name}` : k))) }))] : []),
        "-",
        ...(c.lacks ? [{ text: "Choose its empty cells", icon: "fill", act: () => chooseColumn(name) }] : []),
        ...(about && NUMERIC.has(about.kind) ? [{ text: "Show its chart", icon: "charts", act: () => go("/charts", { ...shared.value, names: encodeURIComponent(name) }) }] : []),
        ...(isNumeric(c.key) ? [{ text: tinted.value[c.key] ? "No colour by value" : "Colour by value", icon: "sun", act: () => (tinted.value = { ...tinted.value, [c.key]: !tinted.value[c.key] }) }] : []),
        { text: "Group by it", icon: "group", act: () => setParams({ group: [...groups(), c.key].map(encodeURIComponent).join(",") }) },
        { text: "Hide", icon: "close", act: () => setColumns(keys.filter((k) => k !== c.key)) },
      ]} />`}</${Popover}>
    </div>`;
  }, [keys.join(), order?.key, order?.desc]);
}

async function chooseColumn(name) {
  try {
    const found = await api.get("/api/chosen", { q: { ...baseQuery(), limit: 500 } });
    const { rows } = await api.get("/api/table", { q: { runs: found.runs, columns: [`count:${name}`], limit: 500 } });
    const empty = rows.filter((r) => !r[1]).map((r) => r[0]);
    cells.value = { ...cells.value, [name]: new Set(empty) };
    if (!empty.length) say(`Every run has values of ${name}.`);
  } catch (e) { failed(e); }
}
export function toggleCell(name, run, more) {
  const now = new Set(cells.value[name] || []);
  for (const one of more || [run]) if (more) now.add(one); else if (now.has(one)) now.delete(one); else now.add(one);
  const all = { ...cells.value };
  if (now.size) all[name] = now; else delete all[name];
  cells.value = all;
}

function RunTable({ keys, base }) {
  const pins = pinned.value;
  const q = { ...base, columns: keys, ...(keys.some((k) => tinted.value[k]) ? { ranges: true } : {}) };
  const key = JSON.stringify(q);
  const pages = usePages(key, useCallback((offset, limit) => api.get("/api/table", { q: { ...q, offset, limit } }).then((d) => ({ ...d, keys })), [key]), revision.value);
  const top = usePages(`${key}${pins}`, useCallback((offset, limit) => (pins.length ? api.get("/api/table", { q: { columns: keys, runs: pins, sort: base.sort, offset, limit } }).then((d) => ({ ...d, keys })) : Promise.resolve({ rows: [], total: 0 })), [key, pins]), revision.value);
  useEffect(() => { filterError.value = pages.error && base.where ? pages.error.message : ""; if (pages.error && !base.where) failed(pages.error); }, [pages.error]);
  const fixed = base.runs || base.where || base.search ? 0 : Math.min(20, top.first?.rows?.length || 0);
  const found = pages.first?.total ?? 0;
  useEffect(() => { total.value = pages.first ? found : null; }, [found, pages.first]);
  const columns = useMemo(() => keys.map((k) => ({ key: k, width: widthOf(k), numeric: isNumeric(k), fill: fillable(k), lacks: fillable(k) && server.value.names[parts(k)[1]].runs < server.value.runs })), [keys.join(), server.value]);
  const count = found + fixed;
  const rowAt = (i) => (i < fixed ? top.first.rows[i] : pages.row(i - fixed));
  const pageAt = (i) => (i < fixed ? top.first : pages.page(i - fixed));
  // rows of the last query are shown until new rows come, so look up the column in the page's own keys
  const valueAt = (i, column) => { const row = rowAt(i), at = pageAt(i)?.keys?.indexOf(column) ?? -1; return row && at >= 0 ? row[1 + at] : undefined; };
  const anchor = useRef(null);
  const see = useCallback((a, b) => { pages.see(Math.max(0, a - fixed), Math.max(0, b - fixed)); ask(a, b); }, [key, fixed, pages.first, columns]);
  const asked = useRef(null);
  const ask = (a, b) => { // requests the prices of the empty cells in rows a to b
    clearTimeout(asked.current);
    asked.current = setTimeout(() => {
      for (const c of columns.filter((c) => c.fill)) {
        const name = parts(c.key)[1], known = prices.value[name] || {}, runs = [];
        for (let i = a; i <= b && runs.length < 60; i++) {
          const row = rowAt(i);
          if (row && valueAt(i, c.key) === null && !known[row[0]]) runs.push(row[0]);
        }
        if (runs.length) api.get("/api/price", { name, runs: runs.join(",") }).then((more) => (prices.value = { ...prices.value, [name]: { ...(prices.value[name] || {}), ...more } }), () => {});
      }
    }, 200);
  };
  useEffect(() => () => clearTimeout(asked.current), []);
  const tick = (run) => { const now = new Set(picked.value); if (now.has(run)) now.delete(run); else now.add(run); picked.value = now; };
  const order = [...picked.value];
  const lead = (i) => {
    const row = rowAt(i);
    if (!row) return html`<span class="ghost"></span>`;
    const run = row[0], at = order.indexOf(run), isPinned = pins.includes(run);
    return html`<label class="tick"><input type="checkbox" aria-label=${`Choose run ${run}`} checked=${at >= 0} onChange=${() => tick(run)} /></label><i class=${`state ${pageAt(i)?.status?.[run] || ""}`} role="img" aria-label=${pageAt(i)?.status?.[run] || ""} title=${pageAt(i)?.status?.[run]}></i>
      <a class="runlink" tabindex="-1" href=${link(`/run/${run}`)} title=${run}>${pageAt(i)?.called?.[run] || short(run)}</a>
      <button type="button" tabindex="-1" class=${`pin ${isPinned ? "on" : ""}`} aria-label=${`${isPinned ? "Unpin" : "Pin"} run ${run}`} aria-pressed=${isPinned} onClick=${() => (pinned.value = isPinned ? pins.filter((r) => r !== run) : [...pins, run])}><${Icon} name="pin" size=${13} /></button>`;
  };
  const cell = (i, c, k, focused, setFocus) => {
    const row = rowAt(i);
    return html`<${Cell} key=${c.key} id=${`cell-${i}-${k}`} row=${row} run=${row?.[0]} value=${valueAt(i, c.key)} column=${c} page=${pageAt(i)} focused=${focused}
      choose=${(e) => {
        setFocus({ r: i, c: k });
        const name = parts(c.key)[1];
        if (e.shiftKey && anchor.current?.name === name) {
          const [a, b] = [Math.min(i, anchor.current.i), Math.max(i, anchor.current.i)], more = [];
          for (let n = a; n <= b; n++) { const r = rowAt(n); if (r && valueAt(n, c.key) === null) more.push(r[0]); }
          toggleCell(name, row[0], more);
        } else toggleCell(name, row[0]);
        anchor.current = { name, i };
      }} />`;
  };
  const act = (r, c, pressed) => {
    const row = rowAt(r);
    if (!row) return;
    if (c >= 0 && columns[c].fill && valueAt(r, columns[c].key) === null) toggleCell(parts(columns[c].key)[1], row[0]);
    else if (pressed === " ") tick(row[0]); else go(`/run/${row[0]}`);
  };
  const head = useHead(keys);
  if (pages.first && !count) return html`<${Empty} title="No run fits"><p>Change the filter or the search.</p><${Button} onClick=${() => setParams({ where: "", search: "", runs: "" })}>Clear filter</${Button}></${Empty}>`;
  const all = picked.value.size > 0;
  return html`<${Grid} label="Runs" asked=${key} answered=${pages.key} count=${count} columns=${columns} lead=${lead} see=${see} act=${act} cell=${cell} head=${head}
    leadHead=${html`<label class="tick"><input type="checkbox" aria-label="Choose all shown runs" checked=${all} onChange=${async () => {
      if (all) picked.value = new Set();
      else try { picked.value = new Set((await api.get("/api/chosen", { q: { ...base, limit: 200 } })).runs); } catch (e) { failed(e); }
    }} /></label><span class="name">run</span>`}
    foot=${count > 0 && count <= 12 && html`<${Hint} columns=${columns} />`}
    rowClass=${(i) => `${i < fixed ? "pinned" : ""} ${i === fixed - 1 ? "lastpinned" : ""} ${rowAt(i) && picked.value.has(rowAt(i)[0]) ? "picked" : ""}`} />`;
}

// Tells the user, below a short table, how to fill empty cells or add a column.
const Hint = ({ columns }) => html`<p class="gridhint">${columns.some((c) => c.lacks) ? html`<span class="swatch" aria-hidden="true"></span>Not logged in that run. The cell says how long a replay takes to fill it: click it, or take the whole column from the menu of its head.` : api.snapshot() ? "" : html`Forgot to log something? Add <code>rearview.log("name", value)</code> to the script: the column appears here, with what it costs to fill it for each of these runs.`}</p>`;

function Cell({ id, row, run, value, column, page, focused, choose }) {
  const key = column.key, [form, name] = parts(key), style = { width: `${column.width}px`, ...(row ? tint(key, value, page?.ranges) : {}) };
  const base = `cell ${column.numeric ? "right" : ""} ${focused ? "focus" : ""}`;
  if (!row || value === undefined) return html`<div id=${id} role="gridcell" class=${base} style=${style}><span class="ghost"></span></div>`;
  if (column.fill && value === null) {
    if (flying.value[name]?.has(run)) return html`<div id=${id} role="gridcell" class=${`${base} filling`} style=${style}><span>filling</span></div>`;
    const price = prices.value[name]?.[run], chosen = cells.value[name]?.has(run);
    if (price?.refused) return html`<div id=${id} role="gridcell" class=${`${base} refused`} style=${style} title=${price.refused}><span>no place</span></div>`;
    const text = !price ? "…" : price.nothing ? "none" : span(price.seconds);
    return html`<div id=${id} role="gridcell" class=${`${base} fill ${chosen ? "chosen" : ""}`} aria-selected=${!!chosen} style=${style} title=${price && !price.nothing ? `Not logged in this run. A replay of about ${span(price.seconds)} fills it.` : "Not logged in this run"} onClick=${choose}><span>${text}</span></div>`;
  }
  const filled = column.fill ? page?.filled?.[run]?.[name] : null;
  const mark = filled && filled.n < filled.of && NUMERIC.has(server.value.names[name]?.kind) ? html`<small class="partly" title=${`${filled.n} of ${filled.of} points have a value`}>${filled.n}/${filled.of}</small>` : filled?.unproved ? html`<small class="partly" title="unproved: there was nothing to compare the replay with">*</small>` : "";
  return html`<div id=${id} role="gridcell" class=${`${base} ${filled ? "was" : ""}`} style=${style} onDblClick=${() => form === "fact" && (name === "tags" || name === "note") && (editing.value = { kind: name === "tags" ? "tag" : "note", runs: [run], value })}><${Value} form=${form} name=${name} value=${value} />${mark}</div>`;
}

export function Value({ form, name, value }) {
  if (value === null || value === undefined) return html`<span class="none">–</span>`;
  if (form === "fact") {
    if (name === "status") return html`<${Status} status=${value} />`;
    if (name === "started") return moment(value);
    if (name === "seconds") return span(value);
    if (name === "tags") return value.map((t) => html`<span class="chip" key=${t}>${t}</span>`);
    if (name === "version") return html`<code>${value.slice(0, 8)}</code>`;
    return typeof value === "number" ? num(value) : html`<span title=${value}>${value}</span>`;
  }
  if (typeof value === "string" && value.startsWith('{"$object"')) return html`<${Thing} text=${value} />`;
  return typeof value === "number" ? html`<span title=${value}>${num(value)}</span>` : html`<span title=${value}>${Array.isArray(value) ? value.join(", ") : String(value)}</span>`;
}
export function Thing({ text, big }) {
  const [url, setUrl] = useState(null);
  let about = {};
  try { about = JSON.parse(text); } catch { /* cut off: its kind is all that is shown */ }
  useEffect(() => { let on = true; if (about.kind === "image") api.picture(about.$object).then((u) => on && setUrl(u), () => {}); return () => { on = false; }; }, [about.$object]);
  if (about.kind === "image") return url ? html`<img class=${big ? "picture" : "thumb"} src=${url} alt="logged image" />` : html`<span class="none">image</span>`;
  return html`<span class="none">${about.kind || "object"}</span>`;
}

function GroupTable({ keys, grouped, base }) {
  const [open, setOpen] = useState({});
  const rest = keys.filter((k) => !grouped.includes(k) && parts(k)[0] !== "arg" && isNumeric(k) && k !== "fact:started");
  const q = { ...base, columns: rest, group: grouped, limit: 500 };
  const key = JSON.stringify(q);
  const [data, setData] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    api.get("/api/table", { q }, stop.signal).then((d) => { setData({ ...d, keys: rest, key }); filterError.value = ""; }, (e) => { if (base.where) filterError.value = e.message; else failed(e); });
    return () => stop.abort();
  }, [key, revision.value]);
  useEffect(() => setOpen({}), [key]);
  useEffect(() => { if (data) total.value = data.runs ?? null; }, [data]);
  const columns = useMemo(() => rest.map((k) => ({ key: k, width: Math.max(146, widthOf(k)), numeric: isNumeric(k), fill: false })), [rest.join()]);
  const head = useHead(keys);
  if (!data?.groups) return html`<div class="grid" role="grid" aria-label="Groups of runs" tabindex="0"><div role="row"><div role="gridcell"></div></div></div>`;
  const lines = [];
  data.groups.forEach((g, k) => { lines.push({ g, k }); for (const row of open[k] || []) lines.push({ row, k }); });
  const flip = async (g, k) => {
    if (open[k]) { const now = { ...open }; delete now[k]; setOpen(now); return; }
    try {
      const within = Object.fromEntries(grouped.map((name, n) => [name, g.values[n]]));
      const found = await api.get("/api/table", { q: { ...q, within, limit: 200 } });
      setOpen({ ...open, [k]: found.rows });
    } catch (e) { failed(e); }
  };
  const lead = (i) => {
    const line = lines[i];
    if (line.row) return html`<span class="indent"></span><a class="runlink" tabindex="-1" href=${link(`/run/${line.row[0]}`)}>${short(line.row[0])}</a>`;
    return html`<button type="button" tabindex="-1" class=${`caret ${open[line.k] ? "open" : ""}`} aria-label="Show the runs of this group" aria-expanded=${!!open[line.k]} onClick=${() => flip(line.g, line.k)}><${Icon} name="right" size=${14} /></button>
      <span class="groupname">${grouped.map((name, n) => html`<span key=${name}><small>${titleOf(name)}</small> ${line.g.values[n] === null ? "–" : num(line.g.values[n])}</span>`)}</span><span class="times">${line.g.runs}</span>`;
  };
  const cell = (i, c, k, focused) => {
    const line = lines[i], style = { width: `${c.width}px` }, at = data.keys.indexOf(c.key);
    const cls = `cell ${c.numeric ? "right" : ""} ${focused ? "focus" : ""}`;
    if (line.row) return html`<div key=${c.key} id=${`cell-${i}-${k}`} role="gridcell" class=${cls} style=${style}><${Value} form=${parts(c.key)[0]} name=${parts(c.key)[1]} value=${at < 0 ? null : line.row[1 + at]} /></div>`;
    const [mean, sd] = line.g.cells[at] || [null, null], [low, high] = data.ranges[c.key] || [];
    const band = line.g.runs > 1 && c.numeric && typeof mean === "number" && high > low ? { left: `${(100 * (Math.max(low, mean - sd) - low)) / (high - low)}%`, right: `${100 - (100 * (Math.min(high, mean + sd) - low)) / (high - low)}%` } : null;
    return html`<div key=${c.key} id=${`cell-${i}-${k}`} role="gridcell" class=${cls} style=${{ ...style, ...tint(c.key, mean, data.ranges) }} title=${sd ? `mean ${mean}, standard deviation ${sd}` : undefined}>
      ${band && html`<span class="band"><i style=${band}></i><b style=${{ left: `${(100 * (mean - low)) / (high - low)}%` }}></b></span>`}<${Value} form=${parts(c.key)[0]} name=${parts(c.key)[1]} value=${mean} />${sd ? html`<small class="sd">± ${num(sd, 2)}</small>` : ""}</div>`;
  };
  return html`<${Grid} label="Groups of runs" asked=${key} answered=${data.key} count=${lines.length} columns=${columns} lead=${lead} leadWidth=${Math.min(460, 150 + 120 * grouped.length)} cell=${cell} head=${head}
    act=${(r) => lines[r].g && flip(lines[r].g, lines[r].k)} leadHead=${html`<span class="name">${grouped.map(titleOf).join(", ")}</span>`} rowClass=${(i) => (lines[i].g ? "group" : "inner")} />`;
}

function ActionBar({ keys, base }) {
  const names = Object.keys(cells.value), runs = [...picked.value];
  const busy = Object.values(jobs.value).filter((j) => !j.over);
  if (planning.value) return null;
  const count = names.reduce((n, name) => n + cells.value[name].size, 0);
  if (count) {
    const union = new Set(names.flatMap((n) => [...cells.value[n]]));
    let cost = 0, known = 0;
    for (const n of names) for (const r of cells.value[n]) { const p = prices.value[n]?.[r]; if (p?.seconds !== undefined) { cost += p.seconds; known++; } }
    return html`<div class="actions" role="region" aria-label="Chosen cells"><${Icon} name="fill" /><span><b>${many(count, "cell")}</b> of ${names.join(", ")} in ${many(union.size, "run")}</span>${names.length * union.size > count ? html`<span class="price" title="A replay of a run fills all chosen columns of it">all of these runs will be filled</span>` : ""}
      <span class="price">${known === count ? `about ${span(cost)} of replay` : "price is being worked out"}</span><span class="spacer"></span>
      <${Button} kind="quiet" onClick=${() => (cells.value = {})}>Let go</${Button}>
      <${Button} kind="primary" icon="replay" onClick=${() => (planning.value = { names, runs: [...union] })}>Show the plan</${Button}></div>`;
  }
  if (runs.length) {
    const writable = server.value.writable;
    return html`<div class="actions" role="region" aria-label="Chosen runs"><span><b>${many(runs.length, "run")}</b> chosen</span><span class="spacer"></span>
      <${Button} icon="charts" onClick=${() => go("/charts", { runs: runs.join(",") })}>Charts</${Button}>
      ${runs.length === 2 && html`<${Button} icon="versions" onClick=${() => go("/versions", { a: runs[0], b: runs[1] })}>Compare source</${Button}>`}
      <${Button} icon="tag" disabled=${!writable} label=${writable ? "Tag these runs" : "Read-only: start with rearview ui --allow-replay"} onClick=${() => (editing.value = { kind: "tag", runs })}>Tag</${Button}>
      <${Button} disabled=${!writable} label=${writable ? "Write a note about these runs" : "Read-only: start with rearview ui --allow-replay"} onClick=${() => (editing.value = { kind: "note", runs })}>Note</${Button}>
      <${Button} icon="pin" onClick=${() => (pinned.value = [...new Set([...pinned.value, ...runs])])}>Pin</${Button}>
      <${Button} onClick=${() => setParams({ runs: runs.join(",") })}>Only these</${Button}>
      <${Button} kind="quiet" onClick=${() => (picked.value = new Set())}>Let go</${Button}></div>`;
  }
  if (busy.length) return html`<div class="actions" role="region" aria-label="Backfills under way">${busy.map((j) => html`<a class="jobline" href=${link(`/replay/${j.id}`)}><span class="dot"></span>filling ${(j.names || []).join(", ")}<progress max="1" value=${j.done || 0}></progress>${j.left ? `${span(j.left)} left` : ""}</a>`)}</div>`;
  return null;
}

export function Edit({ what, close }) {
  const [text, setText] = useState("");
  const writable = server.value.writable;
  const send = async (body) => {
    try { await api.post(`/api/${what.kind}`, { runs: what.runs, ...body }); say(what.kind === "tag" ? "Tagged" : "Noted"); close(); } catch (e) { failed(e); }
  };
  return html`<${Dialog} title=${what.kind === "tag" ? "Tags" : what.kind === "name" ? "Name" : "Note"} close=${close}>
    <p class="muted">${what.runs.length === 1 ? `Run ${what.runs[0]}` : many(what.runs.length, "run")}</p>
    ${!writable && html`<p class="warn">This page is read-only. Start it with <code>rearview ui --allow-replay</code>, or use <code>rearview ${what.kind} ${what.runs[0]} …</code></p>`}
    ${what.kind === "tag" && what.value?.length > 0 && html`<p>${what.value.map((t) => html`<span class="chip">${t}${writable && html`<button type="button" aria-label=${`Take away the tag ${t}`} onClick=${() => send({ text: t, remove: true })}>×</button>`}</span>`)}</p>`}
    ${what.kind === "note" && what.value && html`<pre class="note">${what.value}</pre>`}
    <form class="row-form" onSubmit=${(e) => { e.preventDefault(); if (text.trim()) send({ text: text.trim() }); }}>
      <input class="input" autofocus aria-label=${what.kind} disabled=${!writable} placeholder=${what.kind === "tag" ? "baseline" : what.kind === "name" ? "a name for the run" : "diverged after the warm-up"} value=${text} onInput=${(e) => setText(e.currentTarget.value)} />
      <button type="submit" class="button primary" disabled=${!writable}>Add</button></form>
  </${Dialog}>`;
}
