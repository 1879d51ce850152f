// The explorer (explorer.py): mosaic's charts, and below them the rows behind the brushes. `mosaic` makes what
// the script of mosaic-widget makes, one for each widget; explorer.py puts it before this one. A widget's views
// share its brushes. HTML comes from Python, where all of a cache's text is escaped; other text is set as text.

const STYLE = `
.arrowcache-explorer { line-height: 1.45; font-variant-numeric: tabular-nums; font-size: var(--jp-ui-font-size1, 14px);
  color: var(--jp-content-font-color1, inherit); font-family: var(--jp-content-font-family, system-ui, sans-serif);
  --line: var(--jp-border-color2, rgba(128, 128, 128, 0.35));
  .charts > div { display: grid !important; grid-template-columns: repeat(auto-fill, 280px); gap: 0.6em 1.2em; }
  .plot { flex-direction: column; }
  .plot::before { content: attr(data-column); font-weight: 600; }
  .bar { display: flex; flex-wrap: wrap; gap: 0.5em; align-items: center; margin: 0.6em 0; }
  .count { font-size: 1.15em; margin-right: 0.4em; }
  button, select, input[placeholder] { font: inherit; color: inherit; background: none; padding: 0.1em 0.6em;
    border: 1px solid var(--line); border-radius: 3px; }
  input[placeholder] { width: 9em; margin-left: 1em; }
  button:disabled { opacity: 0.45; }
  button:enabled:hover { border-color: #2f7fc1; color: #2f7fc1; }
  .code code { display: block; overflow-wrap: anywhere; user-select: all; padding: 0.2em 0.6em; margin: 0.3em 0;
    background: rgba(128, 128, 128, 0.12); }
  .table { overflow-x: auto; display: flex; gap: 2.4em; }
  .tiles { display: flex; flex-wrap: wrap; gap: 0.6em; align-items: end; margin-top: 0.3em; }
  figure { margin: 0; min-width: 96px; cursor: pointer; text-align: center; font-size: 0.85em; }
  .table table { border-collapse: collapse; width: auto; font-size: 0.93em; }
  .table tr > :is(th, td) { text-align: left; vertical-align: middle; white-space: normal; max-width: 20em;
    padding: 0.2em 1.2em 0.2em 0; border: 0; border-bottom: 1px solid var(--line); color: inherit; background: none; }
  .table tr > th { font-weight: normal; white-space: nowrap; opacity: 0.75; }
  .table tr > :first-child, .detail:empty, .error:empty { display: none; }
  .table tbody tr { cursor: pointer; }
  .table tbody tr:hover { background: rgba(47, 127, 193, 0.12); }
  .table span { display: inline-block; width: max-content; max-width: 18em; overflow-wrap: break-word; }
  .table img { zoom: 0.75; }
  .detail { border-left: 0.25em solid #2f7fc1; padding-left: 0.8em; margin-top: 0.8em; }
  .error { border-left: 0.25em solid #d55e00; padding-left: 0.6em; }
  .values { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0.5em 1.2em; }
  .values > b { opacity: 0.75; font-weight: normal; }
  .values .bar { margin: 0 0 0.4em; }
  .value { overflow: auto; max-height: 530px; }
  .value img { max-width: 100%; }
  .zoomed img { width: var(--width); max-width: none; height: auto; image-rendering: pixelated !important; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; max-height: 20em; overflow-y: auto; }
}
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

/** Shows the picture in a box larger by a factor, never smaller than at first; a point of the box stays where it is. */
function zoom(box, factor, x = box.clientWidth / 2, y = box.clientHeight / 2) {
  const image = box.querySelector("img");
  const before = image.width;
  const least = Number(image.getAttribute("width"));
  const width = Math.min(Math.max(before * factor, least), 64 * least);
  box.style.setProperty("--width", `${width}px`);
  box.classList.toggle("zoomed", width > least);
  box.scrollLeft = ((box.scrollLeft + x) * width) / before - x;
  box.scrollTop = ((box.scrollTop + y) * width) / before - y;
}

/** What the views of one widget share: who asks its database, what is brushed, and when its rows are asked for. */
function share(model) {
  const { astToDOM, parseSpec, coordinator } = mosaic();
  const asked = new Map();
  const charts = coordinator();
  charts.logger(null); // it would write each query to the console
  charts.databaseConnector({
    query: (query) =>
      new Promise((resolve, reject) => {
        const uuid = String(Math.random());
        asked.set(uuid, { resolve, reject });
        model.send({ ...query, uuid });
      }),
  });
  model.on("msg:custom", ({ uuid, error, type }, buffers) => {
    if (error) asked.get(uuid)?.reject(error);
    else asked.get(uuid)?.resolve(type === "arrow" ? buffers[0].buffer : {});
    asked.delete(uuid);
  });
  const params = new Map();
  let last; // spec
  const draw = () => {
    if (last !== model.get("spec")) params.clear(); // other charts have other brushes
    last = model.get("spec");
    return astToDOM(parseSpec(last), { params });
  };
  const look = { order: "", view: "", beside: "", near: null }; // explorer.py says what each is
  return { charts, params, draw, look, version: model.get("board").version, pause: 0 };
}

async function render({ model, el }, shared) {
  add(el, "style", "", STYLE);
  const root = add(el, "div", "arrowcache-explorer");
  const { element } = await shared.draw();
  element.querySelectorAll(".plot").forEach((plot, i) => {
    plot.dataset.column = model.get("spec").hconcat[i].name;
  });
  add(root, "div", "charts").append(element);
  const count = add(root, "div", "bar");
  const says = add(root, "div", "says");
  const failed = add(root, "div", "error");
  const table = add(root, "div", "table");
  const code = add(root, "div", "code");
  const detail = add(root, "div", "detail");
  const brush = shared.params.get("brush");
  const predicate = () => [brush.predicate() ?? []].flat().join(" and "); // each stands in parentheses
  const { look } = shared;
  const ask = (verb, more) =>
    model.send({ do: verb, where: predicate(), at: model.get("board").first, ...look, ...more });
  const page = (at) => ask("page", { at });
  const show = (changes) => page(0, Object.assign(look, changes));
  let isAsked = false; // for new rows; one question at a time
  let isHeld = false; // a brush, in a chart that new rows would draw anew
  let last = predicate();
  const drawn = {}; // what each part was drawn of
  const isNew = (part, value) => drawn[part] !== (drawn[part] = JSON.stringify(value));

  function button(parent, className, name, act, isOff = false) {
    const made = add(parent, "button", className, name);
    made.disabled = isOff;
    made.onclick = act;
  }

  function choose(parent, name, value, options, act) {
    if (options.length < 2) return;
    const made = add(parent, "select", name);
    made.append(...options.map(([text, one]) => new Option(text, one, false, one === value)));
    made.onchange = () => act(made.value);
  }

  function actions(parent, one, what, isOff = false) {
    const text = add(parent, "input");
    text.placeholder = one ? "reason or tag" : "reason, tag or folder";
    const act = (verb) => () => ask(verb, { one, text: text.value });
    button(parent, "exclude", `Exclude ${what}`, act("exclude"), isOff);
    button(parent, "tag", `Tag ${what}`, () => (text.value ? act("tag")() : text.focus()), isOff);
    if (!one) button(parent, "export", "Export to Parquet", act("export"));
  }

  async function askAnew(client) {
    await client.prepare(); // bounds
    client.requestQuery(client.query(client.filterBy?.predicate(client, true))); // though it was brushed itself
  }

  function drawBoard() {
    const board = model.get("board");
    isAsked = false;
    if (board.version !== shared.version) {
      shared.version = board.version;
      shared.charts.manager.cache().clear();
      shared.charts.clients.forEach(askAnew);
    }
    root.dataset.looks = board.looks;
    says.textContent = board.says;
    failed.textContent = board.error;
    const [shown, all] = [board.count, board.total].map((number) => number.toLocaleString("en"));
    if (isNew("code", board.sql)) drawCode(board);
    if (isNew("rows", [board.ids, board.table])) {
      table.innerHTML = board.table;
      table.querySelectorAll("tbody tr, figure").forEach((line, i) => {
        line.onclick = () => model.send({ do: "open", one: board.ids[i] });
      });
    }
    if (!isNew("bar", [shown, all, board.first, board.step, board.is_brushed, board.choices, board.map, look])) return;
    count.replaceChildren(); // else what is being typed stays
    add(count, "b", "count", `${shown} of ${all} rows`);
    button(count, "earlier", "Earlier", () => page(board.first - board.step), !board.first);
    button(count, "later", "Later", () => page(board.first + board.step), board.first + board.step >= board.count);
    const { map, ...choices } = board.choices;
    for (const [name, options] of Object.entries(choices)) {
      choose(count, name, look[name], options, (value) => show({ [name]: value }));
    }
    choose(count, "map", board.map, map, (text) => ask("map", { text }));
    if (look.near) button(count, "back", "All rows again", () => show({ near: null }));
    actions(count, null, "what is brushed", !board.is_brushed);
  }

  function drawCode(board) {
    code.replaceChildren();
    const ids = model.get("isAlone") ? [`ids = explore.sql(cache, ${board.asked})`] : [];
    const rows = ids.length ? "ids" : "explorer.ids";
    for (const line of [...ids, `Loader(cache, 64, rows=${rows})`, board.sql]) {
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
    const like = (name) => ({ near: [...id, name], view: name, order: "", beside: "" });
    for (const { name, html, slices, is_vector } of columns) {
      add(values, "b", "", name);
      const cell = add(values, "div");
      const tools = add(cell, "div", "bar");
      const value = add(cell, "div", "value");
      value.dataset.column = name;
      value.innerHTML = html;
      if (slices > 1) {
        const slider = add(tools, "input");
        Object.assign(slider, { type: "range", min: 0, max: slices - 1, value: slices >> 1 });
        slider.oninput = () => model.send({ do: "slice", text: name, at: slider.valueAsNumber });
      }
      if (is_vector) button(tools, "similar", "Rows like this", () => show(like(name)));
      if (value.querySelector("img[title]")) {
        button(tools, "larger", "+", () => zoom(value, 2));
        button(tools, "smaller", "−", () => zoom(value, 1 / 2));
        value.onwheel = (event) => {
          if (!event.ctrlKey) return; // which a pinch has, too; without, the page scrolls
          event.preventDefault();
          const { left, top } = value.getBoundingClientRect();
          zoom(value, event.deltaY < 0 ? 1.25 : 0.8, event.clientX - left, event.clientY - top);
        };
      }
      if (!tools.firstChild) tools.remove();
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
    drawn.bar = "";
    clearTimeout(shared.pause);
    shared.pause = setTimeout(() => page(0), PAUSE_MS);
  }

  function refresh() {
    if (isAsked || isHeld || document.visibilityState !== "visible" || !root.isConnected) return;
    isAsked = true;
    ask("refresh");
  }

  for (const name of ["pointerdown", "pointermove", "pointerup", "pointerleave"]) {
    root.addEventListener(name, (event) => {
      isHeld = name !== "pointerleave" && event.buttons > 0;
    });
  }
  const timer = setInterval(refresh, REFRESH_MS);
  const listeners = { board: drawBoard, detail: drawDetail, slice: drawSlice };
  for (const [name, listener] of Object.entries(listeners)) model.on(`change:${name}`, listener);
  brush.addEventListener("value", brushed);
  drawBoard();
  page(model.get("board").first); // others may have asked for other rows
  return () => {
    clearInterval(timer);
    for (const [name, listener] of Object.entries(listeners)) model.off(`change:${name}`, listener);
    brush.removeEventListener("value", brushed);
    for (const { value: plot } of root.querySelectorAll(".plot")) {
      plot.marks.forEach((mark) => shared.charts.disconnect(mark));
      for (const selection of shared.params.values()) {
        selection.reset(selection.clauses.filter(({ source }) => plot.interactors.includes(source)));
      }
    }
  };
}

/** One for each model. */
export default () => {
  let shared;
  return {
    initialize({ model }) {
      shared = share(model);
    },
    render(view) {
      let drawn = render(view, shared);
      const drawAnew = () => {
        drawn = drawn.then((end) => {
          end();
          view.el.replaceChildren();
          return render(view, shared);
        });
      };
      view.model.on("change:spec", drawAnew);
      return () => {
        view.model.off("change:spec", drawAnew);
        drawn.then((end) => end());
      };
    },
  };
};
