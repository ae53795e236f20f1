// Draws lines with uPlot, smoothed if wanted; all charts share one zoom and one cursor.
import uPlot from "./vendor/uplot.js";
import { colorOf, css, dashOf, num } from "./ui.js";

const sync = uPlot.sync("rearview");

// Returns the exponential moving average of `values`, corrected for the few values at its start.
export function smoothed(values, weight) {
  if (!weight) return values;
  const out = new Array(values.length);
  let mean = 0, seen = 0;
  for (let i = 0; i < values.length; i++) {
    const v = values[i];
    if (v === null || !Number.isFinite(v)) { out[i] = null; continue; }
    mean = weight * mean + (1 - weight) * v;
    seen = weight * seen + (1 - weight);
    out[i] = mean / seen;
  }
  return out;
}

// Returns one array of x for all lines, and the columns of each line, with null where the line has no value.
export function aligned(lines) {
  const first = lines[0]?.data[0];
  const same = lines.every(({ data: [x] }) => x.length === first.length && x[0] === first[0] && x[x.length - 1] === first[x.length - 1] && x[x.length >> 1] === first[first.length >> 1]);
  const clean = (column) => { for (let i = 0; i < column.length; i++) if (!Number.isFinite(column[i])) return Array.from(column, (v) => (Number.isFinite(v) ? v : null)); return column; };
  if (same) return { x: first || [], lines: lines.map((l) => l.data.slice(1).map(clean)) };
  const every = new Float64Array(lines.reduce((n, l) => n + l.data[0].length, 0));
  let at = 0;
  for (const l of lines) { every.set(l.data[0], at); at += l.data[0].length; }
  every.sort();
  let n = 0;
  for (let i = 0; i < every.length; i++) if (i === 0 || every[i] !== every[n - 1]) every[n++] = every[i];
  const x = every.slice(0, n), place = new Map();
  x.forEach((v, i) => place.set(v, i));
  return { x, lines: lines.map((l) => l.data.slice(1).map((column) => {
    const out = new Array(n).fill(null);
    for (let i = 0; i < column.length; i++) if (Number.isFinite(column[i])) out[place.get(l.data[0][i])] = column[i];
    return out;
  })) };
}

const faded = (color, share) => { const v = parseInt(color.slice(1), 16); return `rgba(${v >> 16},${(v >> 8) & 255},${v & 255},${share})`; };

// Draws lines into `node`; returns a function that removes the drawing, and one that gives it new data.
export function draw(node, { lines, labels, hidden, width, height, logx, logy, smooth, unit, zoom, spanned, tip }) {
  const shown = lines.map((line, k) => ({ line, k })).filter(({ k }) => !hidden?.has(k));
  const { x, lines: columns } = aligned(shown.map((s) => s.line));
  const banded = shown.length <= 12 && columns.some((c) => c.length === 3);
  const data = [x], series = [{}], bands = [], alone = new Map();
  shown.forEach(({ k }, n) => {
    const color = colorOf(k), [y, low, high] = columns[n];
    let points = 0;
    for (let i = 0; i < y.length && points < 2; i++) if (y[i] !== null) points++;
    const about = { label: labels[k], stroke: color, dash: dashOf(k), width: shown.length > 40 ? 1 : 1.6, points: { show: points < 2, size: 5 }, spanGaps: true };
    if (smooth && banded === false && shown.length <= 8) {
      data.push(y); series.push({ ...about, stroke: faded(color, 0.25), width: 1, label: "" });
    }
    alone.set(data.length, k);
    data.push(smoothed(y, smooth)); series.push(about);
    if (banded && low) {
      data.push(low, high);
      series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true }, { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
      bands.push({ series: [data.length - 1, data.length - 2], fill: faded(color, 0.16) });
    }
  });
  if (data.length === 1) { data.push(new Array(x.length).fill(null)); series.push({}); }
  const grid = { stroke: css("--line"), width: 1 }, ink = css("--muted"), font = "11px system-ui, sans-serif";
  const chart = new uPlot({
    width, height, series, bands, legend: { show: false }, padding: [8, 12, 0, 0],
    scales: { x: { time: false, distr: logx ? 3 : 1, ...(zoom && !logx ? { range: () => zoom } : {}) }, y: { distr: logy ? 3 : 1 } },
    axes: [{ stroke: ink, grid, ticks: grid, font, size: 30, values: (u, v) => v.map((n) => (n === null ? "" : num(n, 5))) }, { stroke: ink, grid, ticks: grid, font, size: 52, values: (u, v) => v.map((n) => (n === null ? "" : num(n, 4))) }],
    cursor: { sync: { key: sync.key, setSeries: false, scales: ["x", null], match: [(a, b) => a === b, () => true] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, focus: { prox: 24 } },
    hooks: {
      setSelect: [(u) => { if (u.select.width > 4 && u.cursor.event) { const a = u.posToVal(u.select.left, "x"), b = u.posToVal(u.select.left + u.select.width, "x"); u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); spanned?.(a, b); } }],
      setCursor: [(u) => tip?.(u, alone)],
    },
  }, data, node);
  node.querySelector("canvas")?.setAttribute("aria-hidden", "true");
  return chart;
}

export function toPng(chart, title) {
  const from = chart.ctx.canvas, scale = devicePixelRatio || 1, head = 26 * scale;
  const to = document.createElement("canvas");
  to.width = from.width; to.height = from.height + head;
  const ctx = to.getContext("2d");
  ctx.fillStyle = css("--panel"); ctx.fillRect(0, 0, to.width, to.height);
  ctx.fillStyle = css("--text"); ctx.font = `600 ${13 * scale}px system-ui, sans-serif`; ctx.fillText(title, 10 * scale, 18 * scale);
  ctx.drawImage(from, 0, head);
  return new Promise((go) => to.toBlob(go, "image/png"));
}

const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
export function toSvg(chart, title) {
  const { width, height } = chart, box = { left: chart.bbox.left / devicePixelRatio, top: chart.bbox.top / devicePixelRatio, width: chart.bbox.width / devicePixelRatio, height: chart.bbox.height / devicePixelRatio };
  const paths = [];
  chart.series.forEach((s, k) => {
    if (k === 0 || !s.label) return;
    let d = "", pen = "M";
    chart.data[k].forEach((v, i) => {
      if (v === null || v === undefined) return;
      const px = box.left + chart.valToPos(chart.data[0][i], "x"), py = box.top + chart.valToPos(v, "y");
      if (px < box.left - 1 || px > box.left + box.width + 1) return;
      d += `${pen}${px.toFixed(2)} ${py.toFixed(2)}`; pen = "L";
    });
    const stroke = typeof s.stroke === "function" ? s.stroke(chart, k) : s.stroke;
    if (d) paths.push(`<path d="${d}" fill="none" stroke="${escape(stroke)}" stroke-width="1.6"><title>${escape(s.label)}</title></path>`);
  });
  const ends = [chart.scales.x.min, chart.scales.x.max, chart.scales.y.min, chart.scales.y.max].map((v) => num(v));
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height + 26}" viewBox="0 -26 ${width} ${height + 26}" font-family="system-ui, sans-serif" font-size="11"><rect y="-26" width="${width}" height="${height + 26}" fill="${css("--panel")}"/><text x="10" y="-9" font-size="13" font-weight="600" fill="${css("--text")}">${escape(title)}</text><rect x="${box.left}" y="${box.top}" width="${box.width}" height="${box.height}" fill="none" stroke="${css("--line")}"/>${paths.join("")}<g fill="${css("--muted")}"><text x="${box.left}" y="${height - 8}">${ends[0]}</text><text x="${box.left + box.width}" y="${height - 8}" text-anchor="end">${ends[1]}</text><text x="${box.left - 5}" y="${box.top + box.height}" text-anchor="end">${ends[2]}</text><text x="${box.left - 5}" y="${box.top + 9}" text-anchor="end">${ends[3]}</text></g></svg>`;
}
