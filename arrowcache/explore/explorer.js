// The explorer (explorer.py): mosaic's charts, and below them the rows behind the brushes. `mosaic` is the
// script of mosaic-widget, which explorer.py puts before this one. HTML comes from Python, where all of a
// cache's text is escaped; other text is set as text.

const STYLE = `
.arrowcache-explorer { line-height: 1.45; font-variant-numeric: tabular-nums;
  color: var(--jp-content-font-color1, inherit); font-family: var(--jp-content-font-family, system-ui, sans-serif); }
.arrowcache-explorer .charts > div { flex-wrap: wrap !important; }
.arrowcache-explorer .bar { display: flex; flex-wrap: wrap; gap: 0.4em; align-items: center; margin: 0.5em 0; }
.arrowcache-explorer code { overflow-wrap: anywhere; user-select: all; }
.arrowcache-explorer .table { overflow-x: auto; }
.arrowcache-explorer .table tbody tr { cursor: pointer; }
.arrowcache-explorer .detail { border-left: 0.25em solid #2f7fc1; padding-left: 0.8em; }
.arrowcache-explorer .detail:empty { display: none; }
.arrowcache-explorer .error { border-left: 0.25em solid #d55e00; padding-left: 0.6em; }
.arrowcache-explorer .error:empty { display: none; }
.arrowcache-explorer .values { display: grid; grid-template-columns: max-content 1fr; gap: 0.3em 1em; }
.arrowcache-explorer .values img { max-width: 100%; }
.arrowcache-explorer pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 20em; overflow-y: auto; }
`;
const PAUSE_MS = 250; // after the last move of a brush, before its rows are asked for
const REFRESH_MS = 3000;

function add(parent, tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

function render({ model, el }) {
  add(el, "style", "", STYLE);
  const root = add(el, "div", "arrowcache-explorer");
  const charts = add(root, "div", "charts");
  const count = add(root, "div", "bar");
  const says = add(root, "div", "says");
  const failed = add(root, "div", "error");
  const table = add(root, "div", "table");
  const code = add(root, "div", "code");
  const detail = add(root, "div", "detail");
  const predicate = () => model.get("params").brush?.predicate ?? "";
  const page = (at) => model.send({ do: "page", text: predicate(), at });
  let version = model.get("board").version;
  let isAsked = false; // for new rows; one question at a time
  let last = predicate();
  let pause = 0;

  function button(parent, className, name, act, isOff = false) {
    const made = add(parent, "button", className, name);
    made.disabled = isOff;
    made.onclick = act;
  }

  function actions(parent, one, what, isOff = false) {
    const text = add(parent, "input");
    text.placeholder = "reason or tag";
    const act = (verb) => () => model.send({ do: verb, one, text: text.value });
    button(parent, "exclude", `Exclude ${what}`, act("exclude"), isOff);
    button(parent, "tag", `Tag ${what}`, () => (text.value ? act("tag")() : text.focus()), isOff);
  }

  async function askAnew(client) {
    await client.prepare(); // bounds
    const others = client.filterBy?.clauses.filter((clause) => !client.filterBy.skip(client, clause)) ?? [];
    client.requestQuery(client.query(others.map((clause) => clause.predicate)));
  }

  function drawBoard() {
    const board = model.get("board");
    isAsked = false;
    if (board.version !== version) {
      version = board.version;
      mosaic.coordinator().manager.cache().clear();
      mosaic.coordinator().clients.forEach(askAnew);
    }
    root.dataset.looks = board.looks;
    says.textContent = board.says;
    failed.textContent = board.error;
    const [shown, all] = [board.count, board.total].map((number) => number.toLocaleString("en"));
    const state = JSON.stringify([board.ids, shown, all, board.sql, board.table]);
    if (state === root.state) return; // what is being typed stays
    root.state = state;
    count.replaceChildren();
    add(count, "b", "count", `${shown} of ${all} rows`);
    button(count, "earlier", "Earlier", () => page(board.first - board.step), !board.first);
    button(count, "later", "Later", () => page(board.first + board.step), board.first + board.step >= board.count);
    actions(count, null, "what is brushed", !board.is_brushed);
    table.innerHTML = board.table;
    table.querySelectorAll("tbody tr").forEach((line, i) => {
      line.onclick = () => model.send({ do: "open", one: board.ids[i] });
    });
    code.replaceChildren();
    for (const line of ["Loader(cache, 64, rows=explorer.ids)", board.sql]) {
      add(add(code, "div"), "code", "", line);
    }
  }

  function drawDetail() {
    const { id, columns } = model.get("detail");
    detail.replaceChildren();
    if (!columns) return;
    const bar = add(detail, "div", "bar");
    add(bar, "b", "", `Row ${id.join(":")}`);
    actions(bar, id, "this row");
    button(bar, "close", "Close", () => detail.replaceChildren());
    const values = add(detail, "div", "values");
    for (const { name, html, slices } of columns) {
      add(values, "b", "", name);
      const cell = add(values, "div");
      const slider = slices > 1 ? add(cell, "input") : null;
      const value = add(cell, "div", "value");
      value.dataset.column = name;
      value.innerHTML = html;
      if (!slider) continue;
      Object.assign(slider, { type: "range", min: 0, max: slices - 1, value: slices >> 1 });
      slider.oninput = () => model.send({ do: "slice", text: name, at: slider.valueAsNumber });
    }
  }

  function drawSlice() {
    const { column, html } = model.get("slice");
    const value = [...detail.querySelectorAll(".value")].find((one) => one.dataset.column === column);
    if (value) value.innerHTML = html;
  }

  function brushed() {
    if (predicate() === last) return;
    last = predicate();
    for (const made of count.querySelectorAll("button")) made.disabled = true; // until their rows are known
    root.state = "";
    clearTimeout(pause);
    pause = setTimeout(() => page(0), PAUSE_MS);
  }

  function refresh() {
    if (isAsked || document.visibilityState !== "visible" || !root.isConnected) return;
    isAsked = true;
    model.send({ do: "refresh" });
  }

  const timer = setInterval(refresh, REFRESH_MS);
  const listeners = { board: drawBoard, detail: drawDetail, slice: drawSlice, params: brushed };
  for (const [name, listener] of Object.entries(listeners)) model.on(`change:${name}`, listener);
  drawBoard();
  mosaic.coordinator().logger(null); // it would write each query to the console
  const end = mosaic.view.render({ model, el: charts });
  return () => {
    clearInterval(timer);
    clearTimeout(pause);
    for (const [name, listener] of Object.entries(listeners)) model.off(`change:${name}`, listener);
    end();
  };
}

export default { initialize: mosaic.view.initialize, render };
