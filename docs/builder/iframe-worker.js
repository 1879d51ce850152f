// A browser starts no worker for a page that is a file: the worker of the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      this.begun = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      frame.contentDocument.body.append(script);
    }
    postMessage(data) {
      this.begun.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
