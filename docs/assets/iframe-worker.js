// A page that is read from a file may not start a worker from another file: the search then runs in a hidden frame of the page instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>
        window.postMessage = data => parent.dispatchEvent(new CustomEvent("answer", { detail: [window, data] }));
      </script><script src="${url}"></script>`;
      addEventListener("answer", ({ detail: [source, data] }) => {
        if (source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data }));
      });
      this.ready = new Promise(resolve => frame.addEventListener("load", resolve));
      this.frame = frame;
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
