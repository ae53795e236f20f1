// The screen with many versions as one execution tree: shared cells, stored states, and the cost to replay all.
import { useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { link, picked, revision, route } from "./state.js";
import { Code, Empty, Loading, html, many, short, size, span, useData } from "./ui.js";

const WIDE = 168, TALL = 46, BOX = 148, HIGH = 36;

// Returns the position of each node: each leaf gets a row of its own, an inner node the mean row of its children.
export function placed(nodes) {
  const below = nodes.map(() => []), roots = [];
  nodes.forEach((n, k) => (n.parent === null ? roots : below[n.parent]).push(k));
  const row = [], depth = nodes.map((n) => 0);
  nodes.forEach((n, k) => { depth[k] = n.parent === null ? 0 : depth[n.parent] + 1; });
  let next = 0;
  const walk = (k) => {
    for (const child of below[k]) walk(child);
    row[k] = below[k].length ? below[k].reduce((sum, c) => sum + row[c], 0) / below[k].length : next++;
  };
  roots.forEach(walk);
  return { row, depth, below, rows: next, columns: Math.max(0, ...depth) + 1 };
}

const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

export function Tree() {
  const chosen = route.value.params.runs || [...picked.value].join(",");
  const { data, error } = useData(`${chosen}/${revision.value}`, (signal) => api.get("/api/tree", { runs: chosen }, signal));
  const [at, setAt] = useState(null);
  if (error && !data) return html`<${Empty} title="These runs make no tree"><p>${error.message}</p></${Empty}>`;
  if (!data) return html`<${Loading} />`;
  const { row, depth, below, rows, columns } = placed(data.nodes);
  const slowest = Math.max(1e-9, ...data.nodes.map((n) => n.seconds || 0));
  const ends = new Map();
  for (const [name, end] of data.ends) ends.set(end, [...(ends.get(end) || []), name]);
  const x = (k) => 10 + depth[k] * WIDE, y = (k) => 14 + row[k] * TALL;
  const shared = data.ends.reduce((n, [, end]) => { for (let k = end; k !== null; k = data.nodes[k].parent) n += 1; return n; }, 0) - data.nodes.length;
  const stored = data.nodes.filter((n) => n.stored).length, node = at === null ? null : data.nodes[at];
  const label = (n) => `cell ${n.number}, ${n.title}: ${n.seconds === null ? "not measured" : span(n.seconds)}, ${many(n.versions.length, "version")}${n.stored ? ", stored" : ""}`;
  const step = (e, k) => {
    const n = data.nodes[k], beside = n.parent === null ? data.nodes.map((_, j) => j).filter((j) => data.nodes[j].parent === null) : below[n.parent];
    const to = { ArrowRight: below[k][0], ArrowLeft: n.parent, ArrowDown: beside[beside.indexOf(k) + 1], ArrowUp: beside[beside.indexOf(k) - 1] }[e.key];
    if (to === undefined || to === null) return;
    e.preventDefault(); setAt(to);
    e.currentTarget.ownerSVGElement.querySelector(`[data-node="${to}"]`)?.focus();
  };
  return html`<div class="treeview"><dl class="figures">
      <div><dt>versions</dt><dd>${data.ends.length}</dd></div><div><dt>cells</dt><dd>${data.nodes.length}</dd></div><div><dt>shared</dt><dd>${shared}</dd></div><div><dt>states stored</dt><dd>${stored}</dd></div>
      <div><dt>one after the other</dt><dd>${span(data.alone)}</dd></div><div><dt>as one tree</dt><dd>${span(data.seconds)}</dd></div></dl>
    <div class="treescroll scroll" tabindex="0" role="region" aria-label="Execution tree">
      <svg class="tree" width=${20 + columns * WIDE + 150} height=${30 + rows * TALL} role="group" aria-label=${`Execution tree of ${many(data.ends.length, "version")}`}>
        ${data.nodes.map((n, k) => n.parent !== null && html`<path key=${`e${k}`} class=${`edge ${n.versions.length > 1 ? "shared" : ""}`} d=${`M${x(n.parent) + BOX},${y(n.parent) + HIGH / 2} C${x(n.parent) + WIDE - 4},${y(n.parent) + HIGH / 2} ${x(k) - 16},${y(k) + HIGH / 2} ${x(k)},${y(k) + HIGH / 2}`} />`)}
        ${data.nodes.map((n, k) => html`<g key=${k} data-node=${k} role="button" tabindex=${k === (at ?? 0) ? 0 : -1} aria-pressed=${at === k} aria-label=${label(n)} class=${`node ${n.versions.length > 1 ? "shared" : ""} ${n.stored ? "stored" : n.kept ? "kept" : ""} ${at === k ? "on" : ""}`} onClick=${() => setAt(k)} onKeyDown=${(e) => { if (e.key === "Enter" || e.key === " ") { setAt(k); e.preventDefault(); } else step(e, k); }}>
          <title>${label(n)}</title><rect class="box" x=${x(k)} y=${y(k)} width=${BOX} height=${HIGH} rx="6" />
          <text x=${x(k) + 8} y=${y(k) + 15}>${clipped(n.title, n.stored || n.kept ? 17 : 20)}</text>
          <text class="cost" x=${x(k) + 8} y=${y(k) + 28}>${n.seconds === null ? "not measured" : span(n.seconds)}${n.versions.length > 1 ? ` · ${n.versions.length} versions` : ""}</text>
          ${n.seconds ? html`<rect class="bar" x=${x(k) + 1} y=${y(k) + HIGH - 4} width=${Math.max(2, (BOX - 2) * (n.seconds / slowest))} height="3" />` : ""}
          ${(n.stored || n.kept) && html`<circle class="mark" cx=${x(k) + BOX - 10} cy=${y(k) + 11} r="4" />`}</g>`)}
        ${[...ends].map(([k, names]) => html`<text key=${`v${k}`} class="end" x=${x(k) + BOX + 8} y=${y(k) + HIGH / 2 + 4}>${names.length > 1 ? `${short(names[0])} and ${names.length - 1} more` : short(names[0])}</text>`)}
      </svg></div>
    <div class="treekeys"><span class="key sharedcell">shared by several versions</span><span class="key storedcell">state stored: replays start there</span><span class="key keptcell">a replay of all keeps this state in memory</span></div>
    ${Object.entries(data.unavailable).map(([name, why]) => html`<p class="warn" key=${name}>${name} cannot be replayed: ${why}.</p>`)}
    ${node ? html`<section class="treecell" aria-label="The chosen cell"><h2>Cell ${node.number}: ${node.title}</h2><p class="muted">${node.seconds === null ? "Not measured yet" : `${span(node.seconds)}, state of ${size(node.bytes)} after it`}; in ${node.versions.slice(0, 6).map((v, k) => html`${k ? ", " : ""}<a href=${link(`/run/${data.runs[v]}`)}>${short(v)}</a>`)}${node.versions.length > 6 ? ` and ${node.versions.length - 6} more` : ""}</p><pre class="diff" tabindex="0">${node.code}</pre></section>`
      : html`<p class="muted">Choose a cell to see its code. The same on the command line:</p>`}
    ${!node && html`<${Code}>${`rearview tree${chosen ? ` ${data.ends.map(([n]) => n).join(" ")}` : ""}`}</${Code}>`}</div>`;
}
