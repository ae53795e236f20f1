// Sends requests to the server. In a snapshot (a page without a server), `window.rearviewSnapshot` answers them.

const KEY = "rearview.token";
let token = "";
try { token = localStorage.getItem(KEY) || ""; } catch { /* not kept then */ }

export const snapshot = () => window.rearviewSnapshot || null;

export function takeToken() {
  const found = /^#token=([^&]+)(?:&to=(.*))?$/.exec(location.hash);
  if (!found) return;
  setToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", found[2] ? `#${decodeURIComponent(found[2])}` : location.pathname + "#/runs");
}

export function setToken(text) {
  token = text.trim();
  try { localStorage.setItem(KEY, token); } catch { /* it lasts as long as the page */ }
}

export class Refused extends Error {
  constructor(message, status, slug) { super(message); this.status = status; this.slug = slug; }
}

async function ask(path, options = {}) {
  const headers = { authorization: `Bearer ${token}`, ...(options.headers || {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is `rearview ui` still running?", 0);
  }
  if (!answer.ok) {
    let said = { error: answer.statusText };
    try { said = await answer.json(); } catch { /* the status has to do */ }
    throw new Refused(said.error, answer.status, said.slug);
  }
  return answer;
}

const query = (path, params) => {
  const text = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {}))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== undefined && one !== null) text.append(name, typeof one === "object" ? JSON.stringify(one) : one);
  const shown = text.toString();
  return shown ? `${path}?${shown}` : path;
};

export async function get(path, params, signal) {
  const still = snapshot();
  if (still) return still.get(path, params);
  return (await ask(query(path, params), { signal })).json();
}

export async function post(path, body) {
  if (snapshot()) throw new Refused("This is a snapshot: nothing can be changed in it.", 403);
  const answer = await ask(path, {
    method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" },
  });
  return answer.json();
}

// Returns the lines of a chart. The server sends a line of JSON that describes them, then their numbers.
export async function chart(q, signal) {
  const still = snapshot();
  if (still) return still.chart(q);
  const data = await (await ask(query("/api/chart", { q }), { signal })).arrayBuffer();
  const bytes = new Uint8Array(data);
  const end = bytes.indexOf(10) + 1;
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  let at = end;
  for (const line of head.lines) {
    line.data = [];
    for (let k = 0; k < line.columns; k++) {
      line.data.push(new Float64Array(data, at, line.n));
      at += 8 * line.n;
    }
  }
  return head;
}

// `picture` and `sound` return URLs of logged images and sounds; beyond 600, the oldest URL is released.
const loaded = new Map();
function address(path, kept) {
  const still = snapshot();
  if (still) return Promise.resolve(kept(still));
  if (!loaded.has(path)) {
    loaded.set(path, ask(path).then((a) => a.blob()).then((b) => URL.createObjectURL(b)));
    if (loaded.size > 600) {
      const [old, url] = loaded.entries().next().value;
      loaded.delete(old);
      url.then((u) => URL.revokeObjectURL(u), () => {});
    }
  }
  return loaded.get(path);
}
export const picture = (oid) => address(`/api/image/${oid}`, (still) => still.picture(oid));
export const sound = (oid) => address(`/api/sound/${oid}`, (still) => still.sound(oid));

export async function download(path, params, name) {
  const blob = await (await ask(query(path, params))).blob();
  saveBlob(blob, name);
}

export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Receives server-sent events with fetch, because EventSource cannot send the token. A hidden page does not listen.
export function listen(heard, status) {
  if (snapshot()) return () => {};
  let stop = null, ended = false, wait = 1000;
  async function follow() {
    while (!ended && !document.hidden) {
      stop = new AbortController();
      try {
        const answer = await ask("/api/events", { signal: stop.signal });
        status(true);
        wait = 1000;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          text += value;
          let at;
          while ((at = text.indexOf("\n\n")) >= 0) {
            const lines = text.slice(0, at).split("\n");
            text = text.slice(at + 2);
            for (const line of lines) if (line.startsWith("data: ")) heard(JSON.parse(line.slice(6)));
          }
        }
      } catch (error) {
        if (error.status === 401) { status(false); return; }
      }
      status(false);
      if (ended || document.hidden) return;
      await new Promise((go) => setTimeout(go, wait));
      wait = Math.min(wait * 2, 15000);
    }
  }
  const seen = () => { if (document.hidden) stop?.abort(); else follow(); };
  document.addEventListener("visibilitychange", seen);
  addEventListener("pagehide", () => stop?.abort());
  follow();
  return () => { ended = true; stop?.abort(); document.removeEventListener("visibilitychange", seen); };
}
