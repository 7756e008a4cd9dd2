// Browsers start no worker off a file, so the search of a page that is opened as one runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.frame.addEventListener("load", () => this.begin(url), { once: true });
      document.body.append(this.frame);
    }
    begin(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.addEventListener("load", () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
      inside.document.head.append(script);
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
