// The screen with the running runs, their seconds per iteration, and the running backfills.
import { useEffect, useState } from "./vendor/hooks.js";
import * as api from "./api.js";
import { Crews } from "./replay.js";
import { link, revision } from "./state.js";
import { Code, Empty, Loading, failed, html, moment, num, short, span } from "./ui.js";

export function UnderWay() {
  const [data, setData] = useState(null);
  useEffect(() => { api.get("/api/underway").then(setData, failed); }, [revision.value]);
  if (!data) return html`<${Loading} />`;
  return html`<section class="screen pad" aria-label="Under way"><h1>Under way</h1>
    ${!data.runs.length && !data.backfills.length && html`<${Empty} title="Nothing is running"><p>Start a run; it shows here with its pace and the time that is left:</p><${Code}>rearview run train.py</${Code}></${Empty}>`}
    ${data.runs.length > 0 && html`<h2>Runs</h2><div class="cards wide">${data.runs.map((r) => html`<${Running} key=${r.run} run=${r} />`)}</div>`}
    ${data.backfills.length > 0 && html`<h2>Backfills</h2><${Crews} list=${data.backfills} />`}
  </section>`;
}
function Running({ run: r }) {
  const done = r.total ? Math.min(1, (r.iteration + 1) / r.total) : null, most = Math.max(...(r.paces || [1]));
  return html`<a class="card" href=${link(`/run/${r.run}`)}><b>${r.name || short(r.run)}</b><span class="muted clip">${r.command}</span>
    ${r.loop ? html`<span>${r.loop} ${r.iteration}${r.total ? ` of ${r.total}${r.guessed ? ", as in earlier runs" : ""}` : ""}</span>` : html`<span class="muted">nothing logged yet</span>`}
    ${done !== null && html`<progress max="1" value=${done} aria-label="share done"></progress>`}
    <span>${r.each ? `${span(r.each)} each` : ""}${r.left !== null && r.left !== undefined ? `, about ${span(r.left)} left` : ""}</span>
    ${r.paces?.length > 1 && html`<svg class="spark" width="120" height="24" role="img" aria-label="seconds per iteration">${r.paces.map((p, k) => html`<rect x=${k * (120 / r.paces.length)} y=${24 - (22 * p) / most} width=${120 / r.paces.length - 1} height=${(22 * p) / most} />`)}</svg>`}
    <span class="muted">since ${moment(r.started)} on ${r.host}, process ${r.pid}</span></a>`;
}
