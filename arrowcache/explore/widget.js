// Draws a board (board.py). All text is set as text: some of it comes from other processes.
// Colors and lines are those of html.py: JupyterLab's, or what is seen on white and on black.

const STYLE = `
.arrowcache-monitor { font-family: var(--jp-content-font-family, system-ui, sans-serif); line-height: 1.45;
  font-size: var(--jp-content-font-size1, 14px); color: var(--jp-content-font-color1, inherit); max-width: 62em;
  --line: var(--jp-border-color2, rgba(128, 128, 128, 0.35)); font-variant-numeric: tabular-nums; }
.arrowcache-monitor .title { display: flex; flex-wrap: wrap; gap: 0.1em 0.6em; align-items: baseline; }
.arrowcache-monitor .path { font-family: monospace; opacity: 0.75; overflow-wrap: anywhere; flex: 1; }
.arrowcache-monitor .state { font-size: 0.87em; white-space: nowrap; }
.arrowcache-monitor .state::before { content: ""; display: inline-block; width: 0.6em; height: 0.6em;
  border-radius: 50%; margin-right: 0.4em; background: #8c8c8c; }
.arrowcache-monitor .state.live::before { background: #009e73; }
.arrowcache-monitor .state.failing::before { background: #d55e00; }
.arrowcache-monitor .error { border-left: 0.25em solid #d55e00; padding: 0.1em 0.6em; margin: 0.3em 0; }
.arrowcache-monitor .bar { display: flex; height: 0.9em; margin: 0.3em 0 0.1em; border: 1px solid var(--line); }
.arrowcache-monitor .small { font-size: 0.87em; opacity: 0.85; }
.arrowcache-monitor .key { margin-left: 1.2em; white-space: nowrap; }
.arrowcache-monitor .key::before { content: ""; display: inline-block; width: 0.7em; height: 0.7em;
  margin-right: 0.35em; background: var(--color); }
.arrowcache-monitor .rates { display: flex; flex-wrap: wrap; gap: 0.4em 1.6em; margin: 0.7em 0; }
.arrowcache-monitor .rate { flex: 1 1 10em; }
.arrowcache-monitor .rate b { margin-left: 0.3em; white-space: nowrap; }
.arrowcache-monitor svg { display: block; width: 100%; height: 2.6em; border-bottom: 1px solid var(--line); }
.arrowcache-monitor .table { overflow-x: auto; margin-bottom: 0.5em; }
.arrowcache-monitor table { border-collapse: collapse; font-size: 0.93em; margin: 0; }
.arrowcache-monitor th, .arrowcache-monitor td { text-align: left; padding: 0.15em 1.1em 0.15em 0;
  border: 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
.arrowcache-monitor th { font-weight: normal; opacity: 0.75; }
.arrowcache-monitor .words { white-space: normal; min-width: 12em; overflow-wrap: anywhere; }
.arrowcache-monitor .nothing { opacity: 0.75; }
`;
const BLUE = "#2f7fc1";
const ORANGE = "#e69f00";
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 40;
const TABLES = [
  ["leases", "Leases", "nothing is leased"],
  ["samplers", "Samplers at work", "no sampler is seen at work"],
  ["waiting", "Waiting samplers", "no writer waits for room"],
  ["loaders", "Loaders", "no loader is seen"],
];
const WORDS = ["command", "why"]; // columns that may take several lines

function add(parent, tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

function drawTitle(parent, board) {
  const title = add(parent, "div", "title");
  add(title, "b", "", "Cache");
  add(title, "span", "path", board.path);
  const [state, says] = !board.is_live ? ["", "stopped "] : board.error ? ["failing", ""] : ["live", ""];
  add(title, "span", `state ${state}`, says + board.time);
}

function drawFill(parent, fill) {
  const leased = Math.min(fill.leased_share, fill.share);
  const parts = [
    ["leased", "leased", leased, ORANGE],
    ["taken", "not leased", fill.share - leased, BLUE],
  ];
  const bar = add(parent, "div", "bar");
  const text = add(parent, "div", "small");
  add(text, "span", "fill", `${Math.round(100 * fill.share)} %: ${fill.text}`);
  for (const [className, name, share, color] of parts) {
    const part = add(bar, "div", className);
    part.style.width = `${100 * share}%`;
    part.style.background = color;
    if (share) add(text, "span", "key", name).style.setProperty("--color", color);
  }
}

function drawRate(parent, rate) {
  const box = add(parent, "div", "rate");
  const text = add(box, "div", "", rate.name);
  add(text, "b", "", rate.text);
  const most = Math.max(1, ...rate.values);
  const step = WIDTH / Math.max(1, rate.values.length - 1);
  const y = (value) => HEIGHT - ((HEIGHT - 2) * value) / most;
  const points = rate.values.map((value, i) => `${i * step},${y(value)}`);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const area = document.createElementNS(SVG, "polygon");
  area.setAttribute("points", [`0,${HEIGHT}`, ...points, `${(points.length - 1) * step},${HEIGHT}`].join(" "));
  area.setAttribute("fill", BLUE);
  area.setAttribute("fill-opacity", "0.2");
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  line.setAttribute("fill", "none");
  line.setAttribute("stroke", BLUE);
  line.setAttribute("stroke-width", "1.5");
  line.setAttribute("vector-effect", "non-scaling-stroke");
  if (points.length > 1) svg.append(area, line);
  box.append(svg);
}

function drawTable(parent, content, name, title, nothing) {
  if (!content.rows.length) {
    const line = add(parent, "div", "nothing");
    add(line, "span", "", `${title}: ${nothing}`);
    return;
  }
  const box = add(parent, "div", "table");
  add(box, "b", "", title);
  const table = add(box, "table", name);
  const head = add(add(table, "thead"), "tr");
  const classes = content.columns.map((column) => (WORDS.includes(column) ? "words" : ""));
  content.columns.forEach((column, i) => add(head, "th", classes[i], column));
  const body = add(table, "tbody");
  for (const row of content.rows) {
    const line = add(body, "tr");
    row.forEach((cell, i) => add(line, "td", classes[i], cell));
  }
}

function draw(root, board) {
  root.replaceChildren();
  root.dataset.looks = board.looks;
  drawTitle(root, board);
  if (board.error) add(root, "div", "error", board.error);
  if (!board.fill) return;
  drawFill(root, board.fill);
  const rates = add(root, "div", "rates");
  for (const rate of board.rates) drawRate(rates, rate);
  for (const [name, title, nothing] of TABLES) drawTable(root, board[name], name, title, nothing);
}

function render({ model, el }) {
  add(el, "style", "", STYLE);
  const root = add(el, "div", "arrowcache-monitor");
  const redraw = () => draw(root, model.get("board"));
  redraw();
  model.on("change:board", redraw);
  return () => model.off("change:board", redraw);
}

export default { render };
