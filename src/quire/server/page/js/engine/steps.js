// The last steps: what was computed together, and how long it took.

import { h } from "../dom.js";
import { Canvas, pointable } from "./canvas.js";
import { colour, ownerColour } from "./palette.js";
import { inSeconds, plural, whole } from "./units.js";

const COLUMN = 6; // pixels
const BATCH = 110; // pixels of the upper part: tokens
const TIME = 34; // pixels of the lower part: milliseconds
const GAP = 12;
const AXIS = 34; // pixels at the left, for the figures

export class Steps {
  constructor() {
    this.canvas = new Canvas(() => BATCH + GAP + TIME, "Batches of the last steps");
    this.note = h("span.note");
    this.scale = h("span");
    this.pointed = h("span.pointed", { "aria-live": "polite" });
    pointable(this.canvas.element, {
      find: (event) => this.#stepAt(event),
      move: (key) => this.#moved(key),
      point: (step) => this.#point(step),
    });
    const key = (name, text) => h("span.key", h(`span.swatch.${name}`), text);
    this.element = h(
      "section.panel.steps",
      { "aria-label": "Steps" },
      h("header", h("h3", "Steps"), this.note),
      this.canvas.element,
      h(".legend", key("decoding", "next tokens"), key("owned", "prompt tokens, in their request’s colour"), this.scale, this.pointed),
    );
  }

  show(history) {
    this.history = history;
    const last = history.steps.at(-1);
    if (last) {
      const chunks = last.chunks.reduce((sum, chunk) => sum + chunk.count, 0);
      this.note.textContent =
        `step ${whole(last.step)}: ${plural(last.decoding, "next token")}` +
        `${chunks ? `, ${plural(chunks, "prompt token")}` : ""}, ${inSeconds(last.seconds)}`;
    } else this.note.textContent = "none yet";
    this.canvas.describe(`Batches of the last steps. ${this.note.textContent}. Arrow keys go from step to step.`);
    this.draw();
  }

  /** As many as there is room for. */
  get #shown() {
    return this.history?.steps.slice(-Math.floor((this.canvas.element.clientWidth - AXIS) / COLUMN)) ?? [];
  }

  draw() {
    const surface = this.history && this.canvas.begin();
    if (!surface) return;
    const { context, width } = surface;
    const steps = this.#shown;
    const most = Math.max(8, ...steps.map(tokens));
    const slowest = Math.max(0.001, ...steps.map((step) => step.seconds));
    // Square roots: a step of one token is seen beside one of five hundred, and one of 10 ms beside one of a second.
    const height = (count) => Math.sqrt(count / most) * BATCH;
    this.#axis(context, width, most, slowest, height);
    this.scale.textContent = steps.length ? `below: its time, at most ${inSeconds(slowest)}` : "";
    steps.forEach((step, i) => {
      const x = AXIS + i * COLUMN;
      const all = tokens(step);
      const pixels = height(all);
      let y = BATCH;
      const part = (count, fill) => {
        const size = (count / all) * pixels;
        context.fillStyle = fill;
        context.fillRect(x, y - size, COLUMN - 1, size);
        y -= size;
      };
      if (step.decoding) part(step.decoding, colour("decoding"));
      for (const chunk of step.chunks) part(chunk.count, ownerColour(this.history.requests.get(chunk.request_id)?.number ?? 0));
      if (step.preempted.length) {
        context.fillStyle = colour("warn");
        context.fillRect(x, 0, COLUMN - 1, 3);
      }
      context.fillStyle = colour("block-cached");
      const time = Math.sqrt(step.seconds / slowest) * TIME;
      context.fillRect(x, BATCH + GAP, COLUMN - 1, time);
      if (step.step === this.at) {
        context.strokeStyle = colour("ink");
        context.strokeRect(x - 0.5, BATCH - Math.max(pixels, 4) - 0.5, COLUMN, Math.max(pixels, 4) + GAP + time + 1);
      }
    });
  }

  // ---- one step, pointed at: by its number, for it moves while others come

  #stepAt({ offsetX }) {
    return this.#shown[Math.floor((offsetX - AXIS) / COLUMN)]?.step ?? null;
  }

  #moved(key) {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[key];
    const steps = this.#shown;
    if (move === undefined || !steps.length) return undefined;
    const at = steps.findIndex((step) => step.step === this.at);
    return steps[at < 0 ? steps.length - 1 : Math.min(Math.max(at + move, 0), steps.length - 1)].step;
  }

  #point(number) {
    this.at = number;
    const step = this.history?.steps.find((one) => one.step === number);
    this.pointed.textContent = step ? words(step) : "";
    this.draw();
  }

  #axis(context, width, most, slowest, height) {
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const ticks = [1, 4, 16, 64, 256, 1024, 4096].filter((tick) => tick < most * 0.7);
    for (const tick of [...ticks.slice(-2), most]) {
      const y = Math.max(BATCH - height(tick), 0.5);
      context.fillStyle = colour("rule");
      context.fillRect(AXIS, y, width - AXIS, 0.5);
      context.fillStyle = colour("ink-soft");
      context.fillText(whole(tick), AXIS - 6, Math.max(y, 6));
    }
    context.fillStyle = colour("rule");
    context.fillRect(AXIS, BATCH + GAP - 1, width - AXIS, 1);
    context.fillRect(AXIS, BATCH, width - AXIS, 1);
  }
}

const tokens = (step) => step.decoding + step.chunks.reduce((sum, chunk) => sum + chunk.count, 0);

export function words(step) {
  const parts = [plural(step.decoding, "next token")];
  for (const chunk of step.chunks) parts.push(`prompt of ${chunk.request_id} from ${whole(chunk.start)}: ${whole(chunk.count)}`);
  if (step.preempted.length) parts.push(`preempted: ${step.preempted.join(", ")}`);
  return `step ${whole(step.step)}, ${inSeconds(step.seconds)}: ${parts.join(" · ")}`;
}
