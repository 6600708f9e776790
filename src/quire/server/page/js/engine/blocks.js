// The pool, block by block: whose each one is, which are shared, which still carry a prefix.

import { h } from "../dom.js";
import { Canvas } from "./canvas.js";
import { colour, ownerColour } from "./palette.js";
import { plural, whole } from "./units.js";
import { CACHED, FIRST_OWNER, FREE } from "./unpack.js";

const TALLEST = 320; // pixels, where the cells are not at their smallest
const CELLS = [14, 12, 10, 8, 7, 6, 5, 4, 3, 2]; // pixels, with the gap

export class BlockMap {
  constructor() {
    this.canvas = new Canvas((width) => this.#layout(width).height, "Map of blocks");
    this.note = h("span.note");
    this.pointed = h("span.pointed", { "aria-live": "polite" });
    const { element } = this.canvas;
    element.tabIndex = 0;
    element.addEventListener("pointermove", (event) => this.#point(this.#blockAt(event)));
    element.addEventListener("pointerleave", () => this.#point(null));
    element.addEventListener("blur", () => this.#point(null));
    element.addEventListener("keydown", (event) => this.#key(event));
    const key = (name, text) => h("span.key", h(`span.swatch.${name}`), text);
    this.element = h(
      "section.panel.blocks",
      { "aria-label": "Blocks" },
      h("header", h("h3", "Blocks"), this.note),
      element,
      h(".legend", key("free", "free"), key("cached", "free, with a prefix that can be found again"), key("shared", "held by several"), h("span", "other colours: one for each request"), this.pointed),
    );
  }

  show(history, blocks) {
    Object.assign(this, { history, blocks });
    const { stats, block_size: size } = history.snapshot;
    const shared = blocks.refs.reduce((sum, refs) => sum + (refs > 1), 0);
    this.note.textContent =
      `${plural(stats.num_blocks, "block")} of ${size} tokens · ${whole(stats.held_blocks)} held` +
      `${shared ? `, ${whole(shared)} of them shared` : ""} · ${whole(stats.cached_blocks)} cached`;
    this.canvas.describe(`Map of blocks: ${this.note.textContent}. Arrow keys go from block to block.`);
    this.draw();
  }

  #layout(width) {
    const count = this.blocks?.owners.length ?? 0;
    for (const cell of CELLS) {
      const columns = Math.max(Math.floor(width / cell), 1);
      const height = Math.ceil(count / columns) * cell;
      if (height <= TALLEST || cell === CELLS.at(-1)) return { cell, columns, height };
    }
  }

  draw() {
    const surface = this.blocks && this.canvas.begin();
    if (!surface) return;
    const { context, width } = surface;
    const { cell, columns } = this.#layout(width);
    const { owners, refs } = this.blocks;
    const colours = this.history.snapshot.sequences.map((view) => ownerColour(this.history.requests.get(view.request_id)?.number ?? 0));
    const [free, cached, paper] = [colour("block-free"), colour("block-cached"), colour("paper")];
    const side = cell > 3 ? cell - 1 : cell;
    const hole = Math.max(1, Math.round(side * 0.4));
    let fill = null;
    for (let block = 0; block < owners.length; block++) {
      const owner = owners[block];
      const next = owner === FREE ? free : owner === CACHED ? cached : colours[owner - FIRST_OWNER];
      if (next !== fill) context.fillStyle = fill = next;
      const x = (block % columns) * cell;
      const y = Math.floor(block / columns) * cell;
      context.fillRect(x, y, side, side);
      if (refs[block] > 1 && side > 2) {
        context.fillStyle = fill = paper;
        context.fillRect(x + (side - hole) / 2, y + (side - hole) / 2, hole, hole);
      }
    }
    if (this.at !== null && this.at !== undefined) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect((this.at % columns) * cell - 1, Math.floor(this.at / columns) * cell - 1, side + 2, side + 2);
    }
  }

  // ---- one block, pointed at

  #blockAt({ offsetX, offsetY }) {
    const { cell, columns } = this.#layout(this.canvas.element.clientWidth);
    const block = Math.floor(offsetY / cell) * columns + Math.floor(offsetX / cell);
    return this.blocks && offsetX < columns * cell && block < this.blocks.owners.length ? block : null;
  }

  #key(event) {
    const { columns } = this.#layout(this.canvas.element.clientWidth);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (step === undefined || !this.blocks) return;
    event.preventDefault();
    const last = this.blocks.owners.length - 1;
    this.#point(Math.min(Math.max((this.at ?? -step) + step, 0), last));
  }

  #point(block) {
    this.at = block;
    this.pointed.textContent = block === null || !this.blocks ? "" : `block ${whole(block)}: ${this.#state(block)}`;
    this.draw();
  }

  #state(block) {
    const owner = this.blocks.owners[block];
    if (owner === FREE) return "free";
    if (owner === CACHED) return "free, with a prefix";
    const refs = this.blocks.refs[block];
    const view = this.history.snapshot.sequences[owner - FIRST_OWNER];
    return refs > 1 ? `${view.request_id} and ${plural(refs - 1, "other")}` : view.request_id;
  }
}
