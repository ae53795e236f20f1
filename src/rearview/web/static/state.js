// State that all screens share: the current address, data from the server, the selected runs.
import { signal, computed, batch } from "./vendor/signals.js";
import * as api from "./api.js";
import { failed } from "./ui.js";

export const server = signal(null);
export const revision = signal(0);
export const connected = signal(true);
export const locked = signal(false);
export const jobs = signal({});
export const flying = signal({}); // cells that a running backfill will fill: {name: Set of runs}

function parsed() {
  const text = location.hash.replace(/^#/, "") || "/runs";
  const [path, rest = ""] = text.split("?");
  return { path: path || "/runs", params: Object.fromEntries(new URLSearchParams(rest)) };
}
export const route = signal(parsed());
addEventListener("hashchange", () => { if (!location.hash.startsWith("#token=")) route.value = parsed(); });

export function link(path, params = {}) {
  const kept = Object.entries(params).filter(([, v]) => v !== undefined && v !== null && v !== "");
  const text = new URLSearchParams(kept).toString();
  return `#${path}${text ? `?${text}` : ""}`;
}
export const go = (path, params) => { location.hash = link(path, params); };
export function setParams(changes) {
  const { path, params } = route.value;
  const merged = { ...params, ...changes };
  history.replaceState(null, "", link(path, merged));
  route.value = parsed();
}
// Parameters that links to other screens keep: the filter, the search and the selected runs.
export const SHARED = ["where", "search", "runs"];
export const shared = computed(() => Object.fromEntries(SHARED.filter((k) => route.value.params[k]).map((k) => [k, route.value.params[k]])));

const remembered = (key, first) => {
  let value = first;
  try { value = JSON.parse(localStorage.getItem(`rearview.${key}`)) ?? first; } catch { /* the first then */ }
  const one = signal(value);
  one.subscribe((now) => { try { localStorage.setItem(`rearview.${key}`, JSON.stringify(now)); } catch { /* not kept */ } });
  return one;
};
export const pinned = remembered("pinned", []);
export const picked = signal(new Set()); // ids of the runs whose check box is ticked
export const prefs = remembered("prefs", { density: "normal", smooth: 0 });

export async function reload() {
  try {
    const found = await api.get("/api/state");
    batch(() => { server.value = found; revision.value = found.revision; locked.value = false; });
  } catch (error) {
    if (error.status === 401) locked.value = true; else failed(error);
  }
}

let timer = null;
export function start() {
  api.takeToken();
  route.value = parsed();
  reload();
  api.listen(heard, (on) => { connected.value = on; });
}
export const watchers = new Set();
function heard(event) {
  for (const one of watchers) one(event);
  if (event.type === "changed" || event.type === "resync" || (event.type === "hello" && server.value && event.revision !== server.value.revision)) {
    clearTimeout(timer);
    timer = setTimeout(reload, 150);
  }
  if (event.type === "replay") {
    const said = event.event;
    const job = { ...(jobs.value[event.job] || { id: event.job, rows: 0, ended: 0 }) };
    if (said.event === "progress") Object.assign(job, { done: said.done, left: said.left, under_way: said.under_way });
    if (said.event === "rows") job.rows += 1;
    if (said.event === "proved" || said.event === "failed" || said.event === "filled") {
      job.ended += 1; job.done = said.done ?? job.done;
      land(job, said.run);
    }
    if (said.event === "ended") { job.over = true; job.result = said.done; job.error = said.error; land(job, null); }
    jobs.value = { ...jobs.value, [event.job]: job };
  }
}
function land(job, run) {
  const now = { ...flying.value };
  for (const [name, runs] of Object.entries(now)) {
    if (!job.names?.includes(name)) continue;
    const left = new Set(runs);
    if (run) left.delete(run); else left.clear();
    if (left.size) now[name] = left; else delete now[name];
  }
  flying.value = now;
}
export function takeOff(job, runs) {
  const now = { ...flying.value };
  for (const name of job.names) now[name] = new Set([...(now[name] || []), ...runs]);
  flying.value = now;
  jobs.value = { ...jobs.value, [job.id]: { ...(jobs.value[job.id] || {}), id: job.id, names: job.names, ended: 0, rows: 0, done: 0, segments: job.segments, started: job.started } };
}
