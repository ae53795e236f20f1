// Answers the requests of a snapshot, a page without a server, from the data in its file.
import { Refused } from "./api.js";

const FORMS = { last: 0, min: 1, max: 2, mean: 3, count: 4 };

export function open(data) {
  const runs = data.runs;
  const value = (run, key) => {
    const at = key.indexOf(":"), form = key.slice(0, at), name = key.slice(at + 1);
    if (form === "fact") return run.facts[name] ?? null;
    if (form === "arg") return run.args[name] ?? null;
    const found = run.stats[name];
    if (!found) return null;
    return form === "last" && found[5] ? found[5] : found[FORMS[form]] ?? null;
  };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const chosen = (q) => {
    if (q.where) throw new Refused("A snapshot has no SQL. Search, sort and group work; for the rest, `rearview ui`.", 400);
    const words = (q.search || "").toLowerCase().split(/\s+/).filter(Boolean);
    let found = runs.filter((r) => (!q.runs || q.runs.includes(r.facts.run)) && words.every((w) => r.text.includes(w)));
    for (const [key, v] of Object.entries(q.within || {})) found = found.filter((r) => value(r, key) === v);
    for (const { key, desc } of [...(q.sort || [])].reverse())
      found = [...found].sort((a, b) => { const x = value(a, key), y = value(b, key); return x === null ? (y === null ? 0 : 1) : y === null ? -1 : desc ? order(y, x) : order(x, y); });
    return found;
  };
  const ranges = (found, columns) => Object.fromEntries(columns.map((key) => {
    const numbers = found.map((r) => value(r, key)).filter((v) => typeof v === "number");
    return [key, numbers.length ? [numbers.reduce((a, b) => Math.min(a, b)), numbers.reduce((a, b) => Math.max(a, b))] : [null, null]];
  }));
  const table = (q) => {
    const found = chosen(q), columns = q.columns || [];
    if (q.group?.length && !Object.keys(q.within || {}).length) {
      const groups = new Map();
      for (const r of found) { const values = q.group.map((k) => value(r, k)), id = JSON.stringify(values); if (!groups.has(id)) groups.set(id, { values, all: [] }); groups.get(id).all.push(r); }
      const out = [...groups.values()].map(({ values, all }) => ({ values, runs: all.length, cells: columns.map((key) => {
        const n = all.map((r) => value(r, key)).filter((v) => typeof v === "number");
        if (!n.length) return [null, null];
        const mean = n.reduce((a, b) => a + b, 0) / n.length;
        return [mean, Math.sqrt(n.reduce((a, b) => a + (b - mean) ** 2, 0) / n.length)];
      }) })).sort((a, b) => order(a.values[0], b.values[0]));
      return { total: out.length, runs: found.length, groups: out, ranges: ranges(found, columns) };
    }
    const at = q.offset || 0;
    return { total: found.length, ranges: ranges(found, columns), filled: {}, status: Object.fromEntries(found.map((r) => [r.facts.run, r.facts.status])), called: Object.fromEntries(found.filter((r) => r.facts.name).map((r) => [r.facts.run, r.facts.name])), rows: found.slice(at, at + (q.limit ?? 100)).map((r) => [r.facts.run, ...columns.map((k) => value(r, k))]) };
  };
  const missing = (what) => { throw new Refused(`${what} is not in this snapshot.`, 404); };
  return {
    icon: data.icon,
    picture: (oid) => data.images[oid] || "",
    sound: (oid) => data.sounds[oid] || "",
    async get(path, params = {}) {
      const q = typeof params.q === "object" ? params.q : {};
      if (path === "/api/state") return data.state;
      if (path === "/api/table") return table(q);
      if (path === "/api/scatter") return { rows: table({ ...q, offset: 0, limit: 1e9 }).rows };
      if (path === "/api/chosen") return { runs: chosen(q).slice(0, q.limit || 100).map((r) => r.facts.run) };
      if (path === "/api/versions") return data.versions;
      if (path === "/api/diff") return data.diffs[`${params.a}/${params.b}`] || missing("This comparison");
      if (path === "/api/underway") return { runs: [], backfills: [], jobs: [] };
      if (path === "/api/complete") return [];
      if (path === "/api/price") return {};
      if (path === "/api/propagate") return data.propagated[[].concat(params.name)[0]] || missing("This probe");
      if (path === "/api/tree") return data.tree || missing("The execution tree");
      if (path === "/api/heat") return data.heat[`${params.name}/${params.run}`] || { x: [], edges: [], counts: [] };
      if (path === "/api/media") { const some = params.runs.split(","); return (data.media[params.name] || []).filter((m) => some.includes(m.run)); }
      if (path.startsWith("/api/content/")) return data.contents[path.slice(13)] || missing("This value");
      if (path.startsWith("/api/run/")) return data.details[path.slice(9)] || missing("This run");
      if (path.startsWith("/api/printed/")) {
        const all = data.printed[path.slice(13)] || [], low = (params.search || "").toLowerCase();
        const lines = all.filter((l) => l[3].toLowerCase().includes(low));
        return { total: all.length, found: lines.length, lines };
      }
      return missing(path);
    },
    async chart(q) {
      const kept = data.charts[q.name] || {}, lines = [];
      let low = Infinity, high = -Infinity, points = 0;
      const pick = (run) => { const d = kept[run]; if (!d) return null; let [x, y] = d; if (q.x === "step") x = x.map((_, i) => i); const keep = x.map((v, i) => i).filter((i) => (q.lo === undefined || x[i] >= q.lo) && (q.hi === undefined || x[i] <= q.hi)); return [keep.map((i) => x[i]), keep.map((i) => y[i] ?? NaN)]; };
      for (const run of q.runs) { const d = pick(run); if (!d || !d[0].length) continue; points += d[0].length; low = Math.min(low, d[0][0]); high = Math.max(high, d[0][d[0].length - 1]); lines.push({ run, raw: true, n: d[0].length, data: d.map((c) => Float64Array.from(c)) }); }
      if (!q.group) return { lines, points, span: lines.length ? [low, high] : null };
      const groups = new Map();
      for (const line of lines) { const g = q.group[line.run]; if (g === undefined) continue; if (!groups.has(g)) groups.set(g, new Map()); line.data[0].forEach((x, i) => { const at = groups.get(g); if (!at.has(x)) at.set(x, []); if (Number.isFinite(line.data[1][i])) at.get(x).push(line.data[1][i]); }); }
      return { points, span: [low, high], lines: [...groups].map(([group, at]) => {
        const xs = [...at.keys()].sort((a, b) => a - b), stats = xs.map((x) => { const v = at.get(x), m = v.reduce((a, b) => a + b, 0) / v.length, s = Math.sqrt(v.reduce((a, b) => a + (b - m) ** 2, 0) / v.length); return [m, m - s, m + s]; });
        return { group, raw: false, n: xs.length, data: [xs, ...[0, 1, 2].map((k) => stats.map((t) => t[k]))].map((c) => Float64Array.from(c)) };
      }) };
    },
  };
}
