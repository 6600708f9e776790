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

const PATIENCE = 2000; // milliseconds until it tries again

export class EngineView {
  constructor(element, ours) {
    this.title = h("h2", "Engine");
    this.state = h("span.state", { role: "status" }, "connecting");
    this.figures = new Figures();
    this.blocks = new BlockMap();
    this.steps = new Steps();
    this.queue = new Queue();
    this.requests = new Requests(ours);
    element.append(
      h("header.engine-head", this.title, this.state),
      this.figures.element,
      this.blocks.element,
      h(".two", this.steps.element, this.queue.element),
      this.requests.element,
    );
    const redraw = () => [this.blocks, this.steps, this.requests].forEach((part) => part.draw());
    onTheme(redraw);
    new ResizeObserver(redraw).observe(element);
    document.addEventListener("visibilitychange", () => this.#arrange());
  }

  start(model) {
    if (this.wanted && this.model === model) return;
    this.stop();
    this.wanted = true;
    this.model = model;
    this.history = new History();
    this.#arrange();
  }

  stop() {
    this.wanted = false;
    this.#arrange();
  }

  /** A tab that nobody sees does not look either. */
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
    while (!signal.aborted) {
      try {
        for await (const event of streamLive(this.model, signal)) await this.#show(event);
        this.#say("the server has ended the view", "trouble");
      } catch (error) {
        if (!signal.aborted) this.#say(error.message, "trouble");
      }
      if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, PATIENCE));
    }
  }

  async #show(event) {
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

  #say(text, kind) {
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.className = `state ${kind}`;
  }
}
