// The screen of the versions of the source: their runs, their changes, and where log statements go in each.
import { useEffect, useMemo, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { link, picked, revision, route, server, setParams } from "./state.js";
import { Tree } from "./tree.js";
import { Button, Code, Empty, Icon, Loading, Select, failed, html, many, moment, short, useData } from "./ui.js";

export function Versions() {
  const p = route.value.params;
  const { data } = useData(`v/${revision.value}`, (signal) => api.get("/api/versions", {}, signal));
  if (!data) return html`<${Loading} />`;
  const all = data.versions;
  if (!all.length) return html`<${Empty} title="No version has been kept yet"><p>Every recorded run keeps its source, with git or without:</p><${Code}>rearview run train.py</${Code}></${Empty}>`;
  const of = (run) => all.find((v) => v.runs.some((r) => r.run === run));
  const chosen = of(p.a) || all[all.length - 1], at = all.indexOf(chosen);
  const probe = p.probe || "", tree = p.show === "tree";
  const a = p.a || chosen.runs[chosen.runs.length - 1].run;
  const b = p.b || "worktree";
  const empties = data.logged.filter((n) => (server.value.names[n]?.runs || 0) < server.value.runs);
  return html`<section class="screen versions" aria-label="Versions">
    <div class="timeline" role="list" aria-label="Versions, newest first" tabindex="0">
      <div role="listitem"><a class=${`version ${b === "worktree" && !probe ? "other" : ""}`} href=${link("/versions", { a, b: "worktree", probe })}><span class="node tree"></span><b>work tree</b><small class="muted">now</small></a></div>
      ${[...all].reverse().map((v) => { const run = v.runs[v.runs.length - 1].run;
        return html`<div role="listitem" key=${v.version}><a class=${`version ${v === chosen ? "on" : ""}`} aria-current=${v === chosen ? "true" : undefined} href=${link("/versions", { a: run, b: p.b, probe })}><span class="node"></span><b><code>${v.version.slice(0, 10)}</code></b><small class="muted">${moment(v.started)}</small>
          <span class="dots" title=${many(v.count, "run")}>${v.runs.slice(-14).map((r) => html`<i key=${r.run} class=${r.status}></i>`)}</span><small>${many(v.count, "run")}</small></a></div>`; })}
    </div>
    <div class="versionmain">
      <div class="subbar"><${Select} label="What is shown" value=${tree ? "tree" : probe ? "probe" : "diff"} set=${(v) => setParams({ show: v === "tree" ? "tree" : "", probe: v === "probe" ? empties[0] || data.logged[0] || "" : "" })} options=${[["diff", "What changed"], ["probe", "Where a probe goes"], ["tree", "What versions share"]]} />
        ${tree && html`<span class="muted">${p.runs ? "the chosen runs" : picked.value.size ? many(picked.value.size, "chosen run") : "the newest runs, as one execution tree"}</span>`}
        ${!tree && !probe && html`<span>from <code>${chosen.version.slice(0, 8)}</code> to</span><${Select} label="Compare with" value=${b} set=${(v) => setParams({ a, b: v })} options=${[["worktree", "the work tree"], ...[...all].reverse().filter((v) => v !== chosen).map((v) => [v.runs[v.runs.length - 1].run, `${v.version.slice(0, 8)}, ${moment(v.started)}`])]} />
          ${at > 0 && html`<${Button} kind="quiet" onClick=${() => setParams({ a: all[at - 1].runs[all[at - 1].runs.length - 1].run, b: a })}>Against the one before</${Button}>`}`}
        ${!tree && probe && html`<${Select} label="Probe" value=${probe} set=${(v) => setParams({ probe: v })} options=${data.logged.map((n) => [n, empties.includes(n) ? `${n} (can be filled)` : n])} />`}</div>
      ${tree ? html`<${Tree} />` : probe ? html`<${Probe} name=${probe} chosen=${chosen} />` : html`<${Sides} a=${a} b=${b} empties=${empties} />`}
    </div>
  </section>`;
}

function Sides({ a, b, empties }) {
  const { data, error } = useData(`${a}/${b}/${b === "worktree" ? revision.value : ""}`, (signal) => api.get("/api/diff", { a, b }, signal));
  const [probes, setProbes] = useState(new Set());
  useEffect(() => {
    if (!empties.length || b !== "worktree" || api.snapshot()) { setProbes(new Set()); return; }
    api.get("/api/propagate", { name: empties }).then((found) => setProbes(new Set(found.flatMap((f) => f.diff.split("\n").filter((l) => l.startsWith("+") && !l.startsWith("+++")).map((l) => l.slice(1).trim())))), () => {});
  }, [empties.join(), b]);
  if (error) return html`<p class="warn pad">${error.message}</p>`;
  if (!data) return html`<${Loading} />`;
  if (!data.files.length) return html`<${Empty} title="Nothing changed"><p>Both have the same source.</p></${Empty}>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Changes">${data.files.map((f) => html`<section key=${f.path} class="sides"><h2>${f.path}<small class="plus">+${f.added}</small><small class="minus">−${f.removed}</small></h2>
    <table aria-label=${`Changes of ${f.path}`}><colgroup><col class="ncol" /><col /><col class="ncol" /><col /></colgroup><tbody>${f.rows.map(([kind, i, left, j, right], k) => { const probe = (kind === "add" || kind === "change") && probes.has(right.trim());
      return kind === "gap" ? html`<tr key=${k} class="gap"><td colspan="4">⋯</td></tr>` : html`<tr key=${k} class=${`${kind} ${probe ? "probe" : ""}`}><td class="n">${i}</td><td class="old"><code>${left}</code></td><td class="n">${j}</td><td class="new"><code>${right}</code>${probe && html`<span class="badge">probe</span>`}</td></tr>`; })}</tbody></table></section>`)}</div>`;
}

// Returns the lines of a unified diff, each with its kind, file path and line number in the old file.
function numbered(diff) {
  let at = 0, path = "";
  return diff.trimEnd().split("\n").map((line) => {
    const head = /^@@ -(\d+)/.exec(line);
    if (line.startsWith("--- ")) path = line.slice(4).replace(/^a\//, "").trim();
    if (head) { at = Number(head[1]); return { kind: "at", line, path }; }
    if (line.startsWith("+++") || line.startsWith("---")) return { kind: "file", line, path };
    if (line.startsWith("+")) return { kind: "add", line, path, before: at };
    return { kind: line.startsWith("-") ? "remove" : "same", line, path, number: at++ };
  });
}

function Probe({ name, chosen }) {
  const [again, setAgain] = useState(0), [moving, setMoving] = useState(null);
  const { data, error } = useData(`${name}/${revision.value}/${again}`, (signal) => api.get("/api/propagate", { name: [name] }, signal));
  if (error) return html`<${Empty} title=${`Nothing carries ${name} back`}><p>${error.message}</p></${Empty}>`;
  if (!data) return html`<${Loading} />`;
  const order = [...data].sort((x, y) => (y.version === chosen.version) - (x.version === chosen.version));
  const writable = server.value.writable;
  const move = async (body) => { try { await api.post("/api/move", { names: [name], ...body }); setMoving(null); setAgain(again + 1); } catch (e) { failed(e); } };
  if (!order.length) return html`<${Empty} title="Every version logs it"><p>No version lacks the statement that logs <code>${name}</code>.</p></${Empty}>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`Where ${name} goes`}>${order.map((one) => html`<section key=${one.version} class=${`probe-place ${one.version === chosen.version ? "on" : ""}`}>
    <h2><code>${one.version.slice(0, 10)}</code><small class="muted">${many(one.runs.length, "run")}</small>
      ${one.refused ? html`<span class="proof not">refused</span>` : html`<span class=${`proof ${one.confidence >= 0.99 ? "exact" : "not"}`}>${one.by_hand ? "placed by hand" : `${Math.round(100 * one.confidence)} % sure`}</span>`}<span class="spacer"></span>
      ${one.by_hand && writable && html`<${Button} kind="small" onClick=${() => move({ run: one.runs[0] })}>Forget the place</${Button}>`}</h2>
    <p class=${one.refused ? "warn" : "muted"}>${one.refused || `Put there because ${one.reasons.join("; ")}.`}</p>
    ${one.diff && html`<pre class="diff" tabindex="0">${numbered(one.diff).map((l, k) => html`<span key=${k} class=${l.kind === "add" ? "add probe" : l.kind}>${l.number !== undefined && writable ? html`<button type="button" class="lineno" title="Put it before this line instead" onClick=${() => setMoving({ run: one.runs[0], path: l.path, line: l.number })}>${String(l.number).padStart(4)}</button>` : html`<span class="lineno">${l.number !== undefined ? String(l.number).padStart(4) : "    "}</span>`}${l.line}\n</span>`)}</pre>`}
    ${moving?.run === one.runs[0] && html`<div class="line movebar"><span>Put the statement before line <b>${moving.line}</b> of ${moving.path} in this version?</span><${Button} kind="primary" onClick=${() => move({ ...moving, after: false })}>Before it</${Button}><${Button} onClick=${() => move({ ...moving, after: true })}>Behind it</${Button}><${Button} kind="quiet" onClick=${() => setMoving(null)}>Leave it</${Button}></div>`}
    ${one.refused && html`<p>Place it by hand:</p><${Code}>${`rearview propagate ${name} --correct ${one.runs[0]} FILE:LINE`}</${Code}>`}
  </section>`)}</div>`;
}
