// The engine's view: connected while it is looked at, and not a moment longer.

import { streamLive } from "../api.js";
import { h } from "../dom.js";
import { onTheme } from "../theme.js";
import { BlockMap } from "./blocks.js";
import { Figures } from "./figures.js";
import { History } from "./history.js";
import { Queue } from "./queue.js";
import { Requests } from "./requests.js";
import { Steps } from "./steps.js";
import { unpackBlocks } from "./unpack.js";

const PATIENCE = [1000, 2000, 4000, 8000, 16000]; // milliseconds until it tries again
const FOR_GOOD = new Set([401, 403, 404]); // asking again changes nothing

export class EngineView {
  constructor(element, ours) {
    this.ours = ours;
    this.title = h("h2", "Engine");
    this.state = h("span.state", { role: "status" });
    this.again = h("button", { type: "button", hidden: true, onclick: () => this.start(this.model, true) }, "Try again");
    this.panels = h(".panels");
    element.append(h("header.engine-head", this.title, this.state, this.again), this.panels);
    const redraw = () => [this.blocks, this.steps, this.requests].forEach((part) => part?.draw());
    onTheme(redraw);
    new ResizeObserver(redraw).observe(element);
    document.addEventListener("visibilitychange", () => this.#arrange());
  }

  start(model, again = false) {
    if (this.wanted && this.model === model && !again) return;
    this.stop();
    this.wanted = true;
    this.model = model;
    this.history = null;
    this.title.textContent = model || "Engine";
    this.panels.replaceChildren();
    this.#say("connecting", "");
    this.#arrange();
  }

  stop() {
    this.wanted = false;
    this.#arrange();
  }

  /** A hidden tab closes its stream. */
  #arrange() {
    const look = this.wanted && !document.hidden;
    if (look && !this.controller) {
      this.controller = new AbortController();
      this.#look(this.controller.signal);
    } else if (!look && this.controller) {
      this.controller.abort();
      this.controller = null;
    }
  }

  async #look(signal) {
    for (let failures = 0; !signal.aborted; failures++) {
      try {
        for await (const event of streamLive(this.model, signal)) {
          await this.#show(event);
          failures = 0;
        }
        if (!signal.aborted) this.#say("the view has ended", "trouble");
      } catch (error) {
        if (signal.aborted) return;
        this.#say(error.message, "trouble");
        if (FOR_GOOD.has(error.status)) return void (this.again.hidden = false);
      }
      await new Promise((resolve) => setTimeout(resolve, PATIENCE[Math.min(failures, PATIENCE.length - 1)]));
    }
  }

  async #show(event) {
    if (!this.history) this.#build();
    const { history } = this;
    history.add(event);
    this.title.textContent = event.model;
    this.#say(event.state, event.state === "ready" ? "ready" : "trouble");
    this.figures.show(event, history);
    if (event.engine) {
      this.blocks.show(history, await unpackBlocks(event.engine));
      this.steps.show(history);
    }
    if (history.snapshot) this.queue.show(history);
    this.requests.show(history);
  }

  /** Each model has a history of its own. */
  #build() {
    this.history = new History();
    this.figures = new Figures();
    this.blocks = new BlockMap();
    this.steps = new Steps();
    this.queue = new Queue();
    this.requests = new Requests(this.ours);
    this.panels.replaceChildren(
      this.figures.element,
      this.blocks.element,
      h(".two", this.steps.element, this.queue.element),
      this.requests.element,
    );
  }

  #say(text, kind) {
    this.again.hidden = true;
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.className = `state ${kind}`;
  }
}
