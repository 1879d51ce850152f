// A notebook's part, in a page of its own: the widget's model, whose messages go to serving.py and come back as
// the answer: 4 bytes that say how long a list is, the list as JSON, and the buffers that its entries have.

import explorer from "/explorer.js";

const state = { isAlone: true }; // no cell has the widget's name
const listeners = {};
let last = Promise.resolve(); // one message after another, as a kernel takes them

const emit = (event, ...given) => [...(listeners[event] ?? [])].forEach((listener) => listener(...given));

async function ask(data) {
  const answer = await fetch("/", { method: "POST", body: JSON.stringify(data) });
  if (!answer.ok) throw new Error(await answer.text());
  const bytes = await answer.arrayBuffer();
  let at = 4 + new DataView(bytes).getUint32(0);
  for (const { data, sizes } of JSON.parse(new TextDecoder().decode(bytes.slice(4, at)))) {
    const buffers = sizes.map((size) => new DataView(bytes.slice(at, (at += size))));
    if (data.method === "custom") emit("msg:custom", data.content, buffers);
    if (data.method !== "update") continue;
    Object.assign(state, data.state);
    for (const name of Object.keys(data.state)) emit(`change:${name}`);
  }
}

function send(data) {
  last = last.then(() => ask(data)).catch((error) => {
    document.getElementById("says").textContent = `Nothing is answered any more: ${error.message}`;
  });
  return last;
}

const model = {
  get: (name) => state[name],
  send: (content) => send({ method: "custom", content }),
  on: (event, listener) => (listeners[event] ??= new Set()).add(listener),
  off: (event, listener) => listeners[event]?.delete(listener),
};

history.replaceState(null, "", "/"); // the token has been used
await send({ method: "request_state" });
const widget = explorer();
widget.initialize({ model });
widget.render({ model, el: document.getElementById("here") });
